//! Where Forebay keeps things on this machine, and every environment variable that says so.
//!
//! | variable | use |
//! |---|---|
//! | `XDG_CONFIG_HOME` | `forebay/forebay.toml` there is read before `/etc/forebay/forebay.toml` |
//! | `XDG_STATE_HOME` | state: logs, control sockets, local trees; else `/var/lib/forebay` for root, `~/.local/state` |
//! | `HOME` | as above |
//! | `NOTIFY_SOCKET` | a mount in the foreground tells systemd there when it serves and when it ends; read by `sd_notify` |
//!
//! Credentials and endpoints come from the stores' own variables, read by `io::object`.

use std::env;
use std::path::{Path, PathBuf};

use forebay_core::{Error, Result};
use forebay_io::object::BucketUrl;
use forebay_io::rng::Rng;
use forebay_volume::VolumeSettings;

const SYSTEM_CONFIG: &str = "/etc/forebay/forebay.toml";

/// The configuration file to read when none is named: the user's own, else the machine's.
pub(crate) fn config() -> PathBuf {
    let own = variable("XDG_CONFIG_HOME").map(|home| home.join("forebay/forebay.toml"));
    own.filter(|path| path.exists()).unwrap_or_else(|| SYSTEM_CONFIG.into())
}

/// The directory for state.
pub(crate) fn state() -> PathBuf {
    place("XDG_STATE_HOME", "/var/lib/forebay", ".local/state/forebay")
}

/// The log of a mount that runs in the background.
pub(crate) fn mount_log(state: &Path, mount_point: &Path) -> PathBuf {
    let mut name: String = mount_point
        .to_string_lossy()
        .trim_matches('/')
        .chars()
        .map(|c| if c.is_alphanumeric() || matches!(c, '.' | '_') { c } else { '-' })
        .collect();
    // File names end at 255 bytes; the end of a path tells more than its start.
    while name.len() > 200 {
        name.remove(0);
    }
    state.join("log").join(format!("mount-{name}.log"))
}

/// Where the mounts that keep their state in `state` have their control sockets.
pub(crate) fn mount_sockets(state: &Path) -> PathBuf {
    state.join("mounts")
}

/// A control socket for this process, of a name that no other has: the first process of each container has the number 1,
/// and those of one host share a state directory.
pub(crate) fn mount_socket(state: &Path) -> PathBuf {
    let (kernel, drawn) = (kernel(), Rng::system().u64());
    mount_sockets(state).join(format!("{kernel}-{drawn:016x}.sock"))
}

/// Whether a control socket was made under the kernel that runs. Only that one knows whether anybody listens: hosts and virtual
/// machines may share a state directory, as where home directories come over a network.
pub(crate) fn is_of_this_kernel(socket: &Path) -> bool {
    let name = socket.file_name().unwrap_or_default().to_string_lossy();
    name.split_once('-').is_some_and(|(first, _)| first == kernel())
}

/// What tells this host's kernel, since it was booted, from others.
fn kernel() -> String {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    id.chars().take_while(char::is_ascii_hexdigit).collect()
}

/// Refuses to keep the cache or the state of a volume in its own bucket, whose files theirs would be, and the bucket in the
/// cache, which removes what it does not know.
pub(crate) fn keep_out_of_bucket(volume: &VolumeSettings, bucket: &BucketUrl) -> Result<()> {
    let Some(bucket) = bucket.directory() else { return Ok(()) };
    keep_out_of(volume, &bucket, "the bucket's directory")?;
    let (bucket, cache) = (resolved(&bucket), volume.cache.directory.as_deref().map(resolved));
    match cache.filter(|cache| bucket.starts_with(cache)) {
        Some(cache) => {
            let (bucket, cache) = (bucket.display(), cache.display());
            let message = format!("the bucket's directory {bucket} lies in the cache directory {cache}");
            Err(Error::invalid(message).with_hint("give the cache a directory that holds nothing else"))
        }
        None => Ok(()),
    }
}

/// The same of any directory, which messages call `what`.
pub(crate) fn keep_out_of(volume: &VolumeSettings, directory: &Path, what: &str) -> Result<()> {
    let directory = resolved(directory);
    let kept = [("cache", volume.cache.directory.as_ref()), ("state", Some(&volume.state_directory))];
    for (name, kept) in kept {
        let kept = kept.map(|kept| resolved(kept)).unwrap_or_default();
        if kept.starts_with(&directory) {
            let (kept, directory) = (kept.display(), directory.display());
            let message = format!("the {name} directory {kept} lies in {what} {directory}");
            return Err(Error::invalid(message).with_hint("choose a directory outside of it"));
        }
    }
    Ok(())
}

/// A path without symlinks, as far as there is something of it.
pub(crate) fn resolved(path: &Path) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let real = |above: &Path| Some(above.canonicalize().ok()?.join(path.strip_prefix(above).ok()?));
    path.ancestors().find_map(real).unwrap_or_else(|| path.clone())
}

fn place(name: &str, system: &str, own: &str) -> PathBuf {
    if let Some(home) = variable(name) {
        return home.join("forebay");
    }
    match variable("HOME").filter(|_| !rustix::process::geteuid().is_root()) {
        Some(home) => home.join(own),
        None => system.into(),
    }
}

/// An absolute path in an environment variable; others are ignored, as the XDG specification says.
fn variable(name: &str) -> Option<PathBuf> {
    env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_of_one_number_have_sockets_of_their_own() {
        let state = Path::new("/s");
        let [one, other] = [mount_socket(state), mount_socket(state)];
        assert_ne!(one, other);
        assert!(one.starts_with(mount_sockets(state)) && one.extension().is_some_and(|end| end == "sock"));
        assert!(is_of_this_kernel(&one) && !is_of_this_kernel(Path::new("/s/mounts/0-0.sock")));
    }

    #[test]
    fn a_mount_has_a_log_of_its_own() {
        let state = Path::new("/s");
        assert_eq!(mount_log(state, Path::new("/mnt/my data")), Path::new("/s/log/mount-mnt-my-data.log"));
        let long = mount_log(state, Path::new(&format!("/{}/end", "x".repeat(500))));
        let name = long.file_name().expect("a name").to_string_lossy().into_owned();
        assert!(name.len() < 255 && name.ends_with("-end.log"), "{name}");
    }
}
