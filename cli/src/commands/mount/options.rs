//! From the configuration file, `-o` and long options, in this order, to one plan of a mount.
//!
//! Each long option is the same as an `-o` option with `_` for `-`, so that fstab can say all that a command line can.

use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use forebay_core::units::{parse_bytes, parse_duration};
use forebay_core::{Error, Result};
use forebay_fuse::{MountOptions, MountPoint};
use forebay_io::object::BucketUrl;
use forebay_volume::VolumeSettings;

use super::MountArguments;
use crate::places;
use crate::settings::Settings;

/// More threads of a session than any host has use for.
const MOST_THREADS: usize = 512;

/// Options that mean something to mount(8), systemd or other file systems, and nothing here.
const IGNORED: &[&str] = &[
    "rw",
    "defaults",
    "auto",
    "noauto",
    "user",
    "nouser",
    "users",
    "owner",
    "group",
    "_netdev",
    "nofail",
    "atime",
    "diratime",
    "nodiratime",
    "strictatime",
    "nostrictatime",
    "lazytime",
    "nolazytime",
    "async",
    "nonempty",
    "default_permissions",
    "exec",
    "nodev",
    "nosuid",
];
/// The longest that names and attributes may be kept: a year. The kernel's own counter would take more.
const TTL_MAX_SECONDS: f64 = 365.0 * 86_400.0;

/// A mount as it is to be made.
#[derive(Debug, Clone)]
pub(super) struct Plan {
    /// The bucket's URL.
    pub(super) source: String,
    /// Where to mount.
    pub(super) target: MountPoint,
    /// What the kernel is told.
    pub(super) mount: MountOptions,
    /// What the volume is told.
    pub(super) volume: VolumeSettings,
    /// What to log.
    pub(super) log: Option<String>,
    /// Check everything and mount nothing.
    pub(super) fake: bool,
}

/// Refuses a mount point that the bucket's own directory is, lies in, or holds: the mount would wait for itself, or show itself
/// within itself without an end.
fn apart(source: &BucketUrl, mount_point: &Path) -> Result<()> {
    let Some(directory) = source.directory() else { return Ok(()) };
    let (Ok(bucket), Ok(target)) = (directory.canonicalize(), mount_point.canonicalize()) else {
        return Ok(());
    };
    if !bucket.starts_with(&target) && !target.starts_with(&bucket) {
        return Ok(());
    }
    let (bucket, target) = (bucket.display(), target.display());
    Err(Error::invalid(format!(
        "the mount point {target} and the bucket's directory {bucket} lie in one another"
    ))
    .with_hint("choose a mount point outside of the bucket's directory, and not above it"))
}

impl Plan {
    /// Puts together what was said.
    ///
    /// # Errors
    /// Each with a hint: an unknown option, a value that does not parse, a mount point that cannot be used.
    pub(super) fn new(arguments: &MountArguments, settings: &Settings) -> Result<Self> {
        let bucket: BucketUrl = arguments.source.parse()?;
        let mut volume = settings.volume.clone();
        if volume.state_directory.as_os_str().is_empty() {
            volume.state_directory = places::state();
        }
        let defaults = &settings.mount;
        let mut mount = MountOptions {
            source: arguments.source.clone(),
            allow_other: defaults.allow_other,
            relatime: defaults.relatime,
            threads: defaults.threads,
            ..MountOptions::default()
        };
        mount.ttl = defaults.ttl_seconds.map(ttl).transpose()?;
        let target = MountPoint::parse(&arguments.directory)?;
        apart(&bucket, &arguments.directory)?;
        let source = arguments.source.clone();
        let log = settings.log.clone();
        let mut plan = Self { source, target, mount, volume, log, fake: false };
        let short = arguments.options.iter().flat_map(|list| list.split(','));
        let short = short.filter(|option| !option.is_empty()).map(|option| match option.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (option, None),
        });
        let given: Vec<_> = short.chain(long_options(arguments)).collect();
        for (name, value) in &given {
            plan.apply(name, *value).map_err(|error| hinted(error, name))?;
        }
        if let Some(threads) = plan.mount.threads.filter(|threads| !(1..=MOST_THREADS).contains(threads)) {
            return Err(Error::invalid(format!(
                "mount option `threads`: {threads} is not from 1 to {MOST_THREADS}"
            ))
            .with_hint("leave it out: as many as the processors allow are enough"));
        }
        plan.mount.read_only = plan.volume.read_only;
        plan.mount.dataset = plan.volume.dataset;
        plan.mount.appearance = plan.volume.import.appearance();
        let is_given = |name: &str| given.iter().any(|(given, _)| *given == name);
        plan.check_together(is_given, arguments.read_only)?;
        places::keep_out_of_bucket(&plan.volume, &bucket)?;
        if let MountPoint::Directory(directory) = &plan.target {
            places::keep_out_of(&plan.volume, directory, "the mount point")?;
        }
        Ok(plan)
    }

    /// Refuses options that would do nothing beside the others, or without one that is missing. Settings of the file are for
    /// other mounts as well.
    fn check_together(&self, is_given: impl Fn(&str) -> bool, read_only: bool) -> Result<()> {
        let Self { mount, volume, .. } = self;
        let refused = |message: &str, hint: &str| Err(Error::invalid(message).with_hint(hint));
        // mount(8) gives `rw` to each mount whose line has no `ro`.
        if is_given("rw") && (is_given("ro") || read_only) {
            return refused("`rw` and `ro` (`--read-only`) are both given", "leave out either");
        }
        let is_fixed = mount.read_only || mount.dataset;
        if is_fixed && is_given("writeback") {
            return refused(
                "a mount that refuses changes has nothing to stage: `writeback` is for others",
                "leave out either `writeback`, or `ro` (`read_only`, `dataset`)",
            );
        }
        if is_fixed && is_given("trash") && volume.trash_ms > 0 {
            return refused(
                "a mount that refuses changes has nothing to keep: `trash` is for others",
                "leave out either `trash`, or `ro` (`read_only`, `dataset`)",
            );
        }
        if is_given("cache_size") && volume.cache.directory.is_none() {
            return refused(
                "`cache_size` without `cache_dir`: nothing is cached on a disk",
                "name the directory: --cache-dir, or `directory` of [volume.cache] in the settings",
            );
        }
        let peers = ["peer_secret", "peer_listen", "peer_keep", "peer_transport"];
        if let Some(peer) = peers.into_iter().find(|name| is_given(name))
            && !volume.cache.peers.is_on()
        {
            return refused(
                &format!("`{peer}` without `peers`: nothing is shared with other hosts"),
                "name the hosts: --peers, or `members` of [volume.cache.peers] in the settings",
            );
        }
        let joins = ["join_listen", "join_address", "join_only"];
        if let Some(join) = joins.into_iter().find(|name| is_given(name))
            && !volume.join.is_on()
        {
            return refused(
                &format!("`{join}` without `join_secret`: this mount alone writes to the volume"),
                "give the secret that all hosts know: --join-secret, or `secret` of [volume.join] in the settings",
            );
        }
        if is_fixed && is_given("join_secret") {
            return refused(
                "a mount that refuses changes needs nobody's leave: `join_secret` is for others",
                "leave out either `join_secret`, or `ro` (`read_only`, `dataset`)",
            );
        }
        if is_fixed && is_given("storage_class") {
            return refused(
                "a mount that refuses changes writes nothing: `storage_class` is for others",
                "leave out either `storage_class`, or `ro` (`read_only`, `dataset`)",
            );
        }
        if is_given("writeback_size") && !volume.writeback.enabled {
            return refused(
                "`writeback_size` without `writeback`: nothing is staged",
                "give --writeback, or set `enabled` of [volume.writeback] in the settings",
            );
        }
        Ok(())
    }

    /// One option by its `-o` name.
    fn apply(&mut self, name: &str, value: Option<&str>) -> Result<()> {
        let given = || value.ok_or_else(|| needs_value(name));
        match name {
            "ro" | "read_only" => self.volume.read_only = true,
            "dataset" => self.volume.dataset = true,
            "anonymous" => self.volume.store.anonymous = true,
            "take_over" => self.volume.take_over = true,
            "allow_other" => self.mount.allow_other = true,
            "plain_type" => self.mount.plain_type = true,
            "dev" => self.mount.devices = true,
            "suid" => self.mount.set_id = true,
            "noexec" => self.mount.executables = false,
            "relatime" => self.mount.relatime = true,
            "noatime" | "norelatime" => self.mount.relatime = false,
            "fake" => self.fake = true,
            "fsname" => self.mount.source = given()?.to_owned(),
            "threads" => self.mount.threads = Some(number(name, given()?)?),
            "ttl" => self.mount.ttl = Some(ttl(number(name, given()?)?)?),
            "log" => self.log = Some(given()?.to_owned()),
            "state_dir" => self.volume.state_directory = absolute(given()?)?,
            "cache_dir" => self.volume.cache.directory = Some(absolute(given()?)?),
            "cache_size" => self.volume.cache.disk_bytes = Some(parse_bytes(given()?)?),
            "peers" => self.volume.cache.peers.members = names(given()?),
            "peer_secret" => self.volume.cache.peers.secret = Some(absolute(given()?)?),
            "peer_listen" => self.volume.cache.peers.listen = Some(given()?.to_owned()),
            "peer_keep" => self.volume.cache.peers.keep = true,
            "peer_transport" => self.volume.cache.peers.transport = given()?.parse()?,
            "join_secret" => self.volume.join.secret = Some(absolute(given()?)?),
            "join_listen" => self.volume.join.listen = Some(given()?.to_owned()),
            "join_address" => self.volume.join.address = Some(given()?.to_owned()),
            "join_only" => self.volume.join.only = true,
            "writeback" => self.volume.writeback.enabled = true,
            "writeback_size" => self.volume.writeback.bytes = parse_bytes(given()?)?,
            "trash" => self.volume.trash_ms = parse_duration(given()?)?.as_millis() as u64,
            "storage_class" => self.volume.store.storage_class = Some(given()?.to_owned()),
            "memory" => self.volume.memory_bytes = parse_bytes(given()?)?,
            "uid" => self.volume.import.uid = number(name, given()?)?,
            "gid" => self.volume.import.gid = number(name, given()?)?,
            "file_mode" => self.volume.import.file_mode = mode(name, given()?)?,
            "dir_mode" => self.volume.import.dir_mode = mode(name, given()?)?,
            ignored if IGNORED.contains(&ignored) || ignored.starts_with("x-") || ignored == "comment" => {}
            unknown => {
                return Err(Error::invalid(format!("unknown mount option `{unknown}`"))
                    .with_hint("`forebay mount --help` lists the options"));
            }
        }
        Ok(())
    }
}

/// The long options that were given, under their `-o` names.
fn long_options(arguments: &MountArguments) -> impl Iterator<Item = (&str, Option<&str>)> {
    let switches = [
        ("read_only", arguments.read_only),
        ("dataset", arguments.dataset),
        ("allow_other", arguments.allow_other),
        ("take_over", arguments.take_over),
        ("relatime", arguments.relatime),
        ("writeback", arguments.writeback),
        ("peer_keep", arguments.peer_keep),
        ("join_only", arguments.join_only),
    ];
    let values = [
        ("cache_dir", &arguments.cache_dir),
        ("cache_size", &arguments.cache_size),
        ("peers", &arguments.peers),
        ("peer_secret", &arguments.peer_secret),
        ("peer_listen", &arguments.peer_listen),
        ("peer_transport", &arguments.peer_transport),
        ("join_secret", &arguments.join_secret),
        ("join_listen", &arguments.join_listen),
        ("join_address", &arguments.join_address),
        ("storage_class", &arguments.storage_class),
        ("memory", &arguments.memory),
        ("trash", &arguments.trash),
        ("writeback_size", &arguments.writeback_size),
        ("state_dir", &arguments.state_dir),
        ("uid", &arguments.uid),
        ("gid", &arguments.gid),
        ("file_mode", &arguments.file_mode),
        ("dir_mode", &arguments.dir_mode),
        ("ttl", &arguments.ttl),
    ];
    let switches = switches.into_iter().filter(|(_, given)| *given).map(|(name, _)| (name, None));
    switches.chain(values.into_iter().filter_map(|(name, value)| Some((name, Some(value.as_deref()?)))))
}

/// The names in a list.
fn names(list: &str) -> Vec<String> {
    list.split([',', ';']).map(str::trim).filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

fn needs_value(name: &str) -> Error {
    Error::invalid(format!("mount option `{name}` needs a value")).with_hint(format!("write {name}=VALUE"))
}

fn number<T: FromStr>(name: &str, value: &str) -> Result<T> {
    value.parse().map_err(|_| {
        Error::invalid(format!("mount option `{name}`: `{value}` is not a number of its kind"))
            .with_hint(format!("write {name}=NUMBER"))
    })
}

fn mode(name: &str, value: &str) -> Result<u16> {
    u16::from_str_radix(value, 8).ok().filter(|mode| *mode <= 0o777).ok_or_else(|| {
        Error::invalid(format!("mount option `{name}`: `{value}` is no octal mode"))
            .with_hint(format!("write for example {name}=0644"))
    })
}

fn ttl(seconds: f64) -> Result<Duration> {
    if !(0.0..=TTL_MAX_SECONDS).contains(&seconds) {
        return Err(Error::invalid(format!("ttl of {seconds} seconds"))
            .with_hint(format!("give 0 to {TTL_MAX_SECONDS} seconds")));
    }
    Ok(Duration::from_secs_f64(seconds))
}

/// Paths must still mean the same when the serving process has left this directory.
/// Says how an option is written here that is known as one of the command line.
fn hinted(error: Error, name: &str) -> Error {
    match name.contains('-') && error.message().starts_with("unknown mount option") {
        true => error.with_hint(format!("within -o it is written `{}`", name.replace('-', "_"))),
        false => error,
    }
}

fn absolute(path: &str) -> Result<PathBuf> {
    std::path::absolute(Path::new(path)).map_err(|error| Error::from(error).context(format!("path `{path}`")))
}

#[cfg(test)]
mod tests;
