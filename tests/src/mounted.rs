//! A mounted bucket for suites and programs: over a folder, over S3, or over S3 that is in trouble all the time.

use std::fs;
use std::path::{Path, PathBuf};

use rand::RngExt;

use crate::meta::{Meta, join_secret};
use crate::s3::Server;
use crate::{DISK_CACHE, Door, Forebay, Manner, Mount, Outcome, Scratch, Seeded, shell};

/// The least that must go wrong for a run to say anything about trouble.
const ENOUGH_TROUBLES: usize = 10;

/// A mounted bucket; unmounted before what is below it goes.
#[derive(Debug)]
pub struct Mounted {
    mount: Mount,
    scratch: Scratch,
    url: String,
    /// Ends with it.
    _server: Option<Server>,
    /// What all requests go through, where they are in trouble.
    door: Option<Door>,
    /// The environment that reaches the bucket.
    variables: Vec<(String, String)>,
    machines: usize,
    /// What serves the tree, where another process does.
    meta: Option<Meta>,
}

impl Mounted {
    /// Over a folder.
    pub fn folder(options: &[&str]) -> Self {
        let scratch = Scratch::new();
        let url = format!("file://{}", scratch.folder("bucket").display());
        Self::new(scratch, &url, options, Vec::new())
    }

    /// Over an S3 server, with a cache on disk, as over all that follow.
    pub fn s3(options: &[&str]) -> Self {
        let server = Server::for_volume();
        let url = format!("s3://{}/a/prefix", server.create_bucket());
        let variables = server.envs();
        let options = [options, DISK_CACHE].concat();
        Self { _server: Some(server), ..Self::new(Scratch::new(), &url, &options, variables) }
    }

    /// Over S3 behind a door, where a tenth of all requests fails, is delayed or refused, or loses its answer: less than
    /// what is tried again until it succeeds. `rng` says what comes.
    pub fn troubled(options: &[&str], rng: &mut Seeded) -> Self {
        let server = Server::for_volume();
        let door = Door::new(server.address()).expect("loopback has free ports");
        let url = format!("s3://{}/a/prefix", server.create_bucket());
        let variables = server.envs_at(door.endpoint());
        let options = [options, DISK_CACHE].concat();
        let mounted = Self::new(Scratch::new(), &url, &options, variables);
        door.trouble(rng.random(), 10);
        Self { _server: Some(server), door: Some(door), ..mounted }
    }

    /// Over S3, where another process holds the volume and this mount joins.
    pub fn joined(options: &[&str]) -> Self {
        let (server, scratch) = (Server::for_volume(), Scratch::new());
        let url = format!("s3://{}/a/prefix", server.create_bucket());
        let (variables, secret) = (server.envs(), join_secret(scratch.path()));
        let meta = Meta::start(&scratch.join("home-meta"), &url, &secret, &[], &variables);
        let options = [options, DISK_CACHE, &["--join-only", "--join-secret", &secret]].concat();
        let mounted = Self::new(scratch, &url, &options, variables);
        Self { _server: Some(server), meta: Some(meta), ..mounted }
    }

    /// Over a folder, with all directories packed.
    pub fn packed(options: &[&str]) -> Self {
        let mounted = Self::folder(&[options, DISK_CACHE].concat());
        let top = mounted.path().display().to_string();
        Forebay::new(&mounted.scratch.join("home"), ["volume", "policy", &top, "packed"]).run().succeeded();
        mounted
    }

    fn new(scratch: Scratch, url: &str, options: &[&str], variables: Vec<(String, String)>) -> Self {
        let mount = Mount::new(&scratch.join("home"), url, &scratch.join("mnt"), options, &variables);
        Self {
            scratch,
            mount,
            url: url.to_owned(),
            _server: None,
            door: None,
            variables,
            machines: 1,
            meta: None,
        }
    }

    /// The mount point.
    pub fn path(&self) -> &Path {
        self.mount.path()
    }

    /// A folder of the mount, made if need be.
    pub fn folder_in(&self, name: &str) -> PathBuf {
        let folder = self.path().join(name);
        fs::create_dir_all(&folder).expect("the mount takes a directory");
        folder
    }

    /// A folder beside the mount.
    pub fn folder_beside(&self, name: &str) -> PathBuf {
        self.scratch.folder(name)
    }

    /// Writes a file beside the mount and gives its path.
    pub fn file(&self, name: &str, text: &str) -> String {
        let path = self.scratch.join(name);
        fs::write(&path, text).expect("the scratch folder is writable");
        path.display().to_string()
    }

    /// Runs `command` in a folder of the mount.
    pub fn run(&self, command: &str) -> Outcome {
        shell(&self.folder_in("work"), command)
    }

    /// Plays so many times; over a store in trouble on until that failed often enough, since how many requests a play makes
    /// is chance, too.
    pub fn play(&self, times: usize, mut play: impl FnMut()) {
        const MOST_MORE: usize = 4;
        for played in 1..=times + MOST_MORE {
            play();
            let is_enough = |door: &Door| door.troubles().values().sum::<usize>() >= ENOUGH_TROUBLES;
            let has_enough = self.door.as_ref().is_none_or(is_enough);
            if played >= times && has_enough {
                return;
            }
        }
    }

    /// Unmounts, and mounts on a machine that never saw the bucket.
    pub fn move_on(&mut self) {
        self.mount.unmount();
        self.mount.remount(&self.scratch.join(&format!("home-{}", self.machines)));
        self.machines += 1;
    }

    /// Unmounts. What was in trouble was so often enough for that to count, and the volume is sound.
    pub fn end(mut self) {
        self.mount.unmount();
        if let Some(meta) = &mut self.meta {
            meta.end();
            self.collect();
            self.check();
        }
        if let Some(door) = &self.door {
            let troubles = door.troubles();
            let all: usize = troubles.values().sum();
            assert!(all >= ENOUGH_TROUBLES, "the store failed too seldom: {troubles:?}");
            door.set(Manner::Pass);
            self.check();
        }
    }

    /// Frees what left for the store early and was written over, or removed, before a mount that joined another one committed it.
    fn collect(&self) {
        let home = self.scratch.join("home");
        Forebay::new(&home, ["gc", &self.url]).envs(&self.variables).run().succeeded();
    }

    /// Unmounts, and finds the volume sound. Returns how much its trash held.
    pub fn end_with_trash(mut self) -> usize {
        let home = self.scratch.join("home");
        let top = self.path().display().to_string();
        let listed = Forebay::new(&home, ["trash", "ls", &top, "--json"]).run().succeeded();
        self.mount.unmount();
        self.check();
        listed.lines().count()
    }

    /// Finds the volume sound, which is not mounted.
    fn check(&self) {
        let home = self.scratch.join("home");
        Forebay::new(&home, ["fsck", &self.url]).envs(&self.variables).run().succeeded();
    }
}
