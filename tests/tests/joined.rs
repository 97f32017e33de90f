//! Several mounts that write to one volume: one holds it and serves its tree, the others join.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use forebay_tests::meta::{free_address, join_secret};
use forebay_tests::s3::Server;
use forebay_tests::{Forebay, Meta, Mount, Scratch, assert_same_trees, shell};
use serde_json::Value;

#[path = "joined/writing.rs"]
mod writing;
#[path = "joined/lost.rs"]
mod lost;
#[path = "joined/asked.rs"]
mod asked;
#[path = "joined/locks.rs"]
mod locks;

/// Hosts that write to one bucket.
struct Hosts {
    scratch: Scratch,
    url: String,
    envs: Vec<(String, String)>,
    server: Option<Server>,
}

impl Hosts {
    fn of_folder() -> Self {
        let scratch = Scratch::new();
        let url = format!("file://{}", scratch.folder("bucket").display());
        Self { scratch, url, envs: Vec::new(), server: None }
    }

    fn of_s3() -> Self {
        let server = Server::for_volume();
        let url = format!("s3://{}/volume", server.create_bucket());
        Self { scratch: Scratch::new(), url, envs: server.envs(), server: Some(server) }
    }

    fn home(&self, name: &str) -> PathBuf {
        self.scratch.join(&format!("home-{name}"))
    }

    /// Mounts on a host of its own, at a port that is free now.
    fn mount(&self, name: &str, options: &[&str]) -> Mount {
        self.mount_at(name, &free_address(), options)
    }

    fn mount_at(&self, name: &str, listen: &str, options: &[&str]) -> Mount {
        let secret = self.secret();
        let ours = ["--join-secret", &secret, "--join-listen", listen];
        let options: Vec<&str> = ours.iter().chain(options).copied().collect();
        Mount::new(&self.home(name), &self.url, &self.scratch.join(name), &options, &self.envs)
    }

    /// Serves the tree without a mount.
    fn serve(&self, name: &str, options: &[&str]) -> Meta {
        Meta::start(&self.home(name), &self.url, &self.secret(), options, &self.envs)
    }

    fn secret(&self) -> String {
        join_secret(self.scratch.path())
    }

    /// What `forebay status` tells of a host's mount.
    #[track_caller]
    fn status(&self, name: &str) -> Value {
        let text = Forebay::new(&self.home(name), ["status", "--json"]).run().succeeded();
        let shown: Value = serde_json::from_str(&text).expect("it is JSON");
        shown["mounts"][0].clone()
    }
}

/// Waits for what others are told of in moments, and see after a second in any case.
#[track_caller]
fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let began = Instant::now();
    while !done() {
        // Twice as long as a mount may come back that was cut off in the middle of a word.
        assert!(began.elapsed() < Duration::from_secs(120), "it never came: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// What one made, wherever that is shown.
const MAKE: &str = r#"
mkdir -p $1/deep && echo one > $1/deep/a && ln -s a $1/deep/link && ln $1/deep/a $1/hard && chmod 600 $1/deep/a
mkfifo $1/pipe && python3 -c "import os; os.setxattr('$1/hard', 'user.k', b'v')"
head -c 9000000 /dev/urandom > $1/pieces && printf x | dd of=$1/pieces bs=1 seek=5000000 conv=notrunc status=none
head -c 3000000 /dev/urandom > $1/old && mv $1/old $1/new && for i in $(seq 40); do echo $i > $1/n$i; done && rm $1/n7
"#;

fn make(mount: &Mount, name: &str) {
    shell(mount.path(), &MAKE.replace("$1", name)).succeeded();
}

/// Both mounts show the same, each after what the other one's kernel may still keep.
#[track_caller]
fn check_same(one: &Mount, other: &Mount) {
    let facts = "find . -printf '%p %y %m %U %G %n %s %T@ %i\\n' | sort";
    let shown = |mount: &Mount| shell(mount.path(), facts).succeeded();
    wait_for("the same names", || shown(one) == shown(other));
    assert_same_trees(one.path(), other.path(), true);
}
