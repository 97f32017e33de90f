//! Where a volume is mounted: a directory, or a FUSE device that someone else has mounted and handed over.
//!
//! Owns the checks that turn a mount that cannot work into one clear error before anything is touched, and the
//! reading of the mount table. Reads no file below the mount point, since that would be a request to ourselves.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::io::ErrorKind as Io;
use std::os::fd::RawFd;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use forebay_core::shell::quoted;
use forebay_core::{Error, ErrorKind, Result};
use rustix::io::Errno;

use crate::sign;

const DEVICE: &str = "/dev/fuse";
const MOUNT_TABLE: &str = "/proc/self/mountinfo";
/// The type of our mounts in the mount table.
const OWN_TYPE: &str = "fuse.forebay";

/// Where to mount.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MountPoint {
    /// On a directory, given by its absolute path without symlinks.
    Directory(PathBuf),
    /// Through an open FUSE device, which has been mounted already.
    Device(RawFd),
}

impl MountPoint {
    /// Reads a mount point as given on a command line, `/dev/fd/N` being a device. One where a mount of ours has died
    /// can be mounted on: mounting clears it.
    ///
    /// # Errors
    /// Each with a hint: missing, not a directory, busy, left behind by another file system that died.
    pub fn parse(path: &Path) -> Result<Self> {
        if let Some(number) = path.to_str().and_then(|path| path.strip_prefix("/dev/fd/")) {
            let device =
                number.parse().map_err(|_| Error::invalid(format!("`{number}` is no descriptor")))?;
            return Ok(Self::Device(device));
        }
        if let Some(directory) = dead_mount(path)? {
            return Ok(Self::Directory(directory));
        }
        let shown = path.display();
        let directory = fs::canonicalize(path).map_err(|error| refused(path, &error))?;
        let metadata = fs::metadata(&directory).map_err(|error| refused(path, &error))?;
        if !metadata.is_dir() {
            return Err(Error::new(
                ErrorKind::NotDirectory,
                format!("mount point {shown} is not a directory"),
            )
            .with_hint("give an empty directory"));
        }
        if device_number(&directory)?.is_some() {
            return Err(Error::new(
                ErrorKind::Exists,
                format!("mount point {shown} is busy: mounted already"),
            )
            .with_hint(format!("run `umount {}` first, or choose another directory", quoted(path))));
        }
        Ok(Self::Directory(directory))
    }

    /// Checks that this machine can serve FUSE there at all.
    pub fn check_device(&self) -> Result<()> {
        if matches!(self, Self::Device(_)) {
            return Ok(());
        }
        fs::OpenOptions::new().read(true).write(true).open(DEVICE).map(drop).map_err(|error| {
            let hint = match error.kind() {
                Io::PermissionDenied => "run as root, or add yourself to the group that may use /dev/fuse",
                _ => {
                    "load the module with `modprobe fuse`; in a container, start it with \
                     `--device /dev/fuse --cap-add SYS_ADMIN`, or give an open device as `/dev/fd/N`"
                }
            };
            Error::new(ErrorKind::Unsupported, format!("cannot open {DEVICE}: {error}")).with_hint(hint)
        })
    }
}

/// A mount of ours in the mount table, whoever serves it, if anybody does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OwnMount {
    /// Where it lies.
    pub directory: PathBuf,
    /// What the table says is mounted there: the bucket's URL, unless the mount was given another name.
    pub source: String,
    device: String,
}

impl OwnMount {
    /// Whether a process is seen to serve it, without touching it. One that is not may be served nevertheless.
    pub fn is_seen_served(&self) -> bool {
        sign::is_shown(&self.device)
    }
}

/// Those that nothing else is mounted on.
pub fn own_mounts() -> Result<Vec<OwnMount>> {
    Ok(own_in_table(&read_table()?))
}

/// Whether `path` lies in a mount whose process is gone. Waits for one that hangs; `umount` finds it busy meanwhile.
pub fn is_dead(path: &Path) -> bool {
    // The attributes of its root may be known to the kernel for as long as they were to last; this is asked each time.
    matches!(rustix::fs::statfs(path), Err(Errno::NOTCONN))
}

/// The directory behind `path`, absolute and without symlinks, if a mount of ours lies there whose process is gone.
pub(crate) fn dead_mount(path: &Path) -> Result<Option<PathBuf>> {
    if !is_dead(path) {
        return Ok(None);
    }
    // The last component cannot be resolved any more; those above it can.
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else { return Ok(None) };
    let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
    let directory = fs::canonicalize(parent).map_err(|error| refused(path, &error))?.join(name);
    let ours = topmost(&directory)?.is_some_and(|mount| mount.kind == OWN_TYPE);
    Ok(ours.then_some(directory))
}

fn refused(path: &Path, error: &std::io::Error) -> Error {
    let shown = path.display();
    let failure = Error::from(std::io::Error::from(error.kind()));
    let (message, hint) = match error.raw_os_error() {
        Some(libc::ENOENT) => (
            format!("mount point {shown} does not exist"),
            format!("create it with `mkdir -p {}`", quoted(path)),
        ),
        Some(libc::ENOTCONN) => (
            format!("mount point {shown} is busy: a file system mounted there has died"),
            format!("detach it with `umount -l {}`, then mount again", quoted(path)),
        ),
        _ => {
            (format!("cannot use mount point {shown}: {error}"), "check the path and its permissions".into())
        }
    };
    Error::new(failure.kind(), message).with_hint(hint)
}

/// The device number, as `major:minor`, of the topmost file system mounted exactly at `directory`.
pub(crate) fn device_number(directory: &Path) -> Result<Option<String>> {
    Ok(topmost(directory)?.map(|mount| mount.device))
}

/// One line of the mount table.
#[derive(Debug, PartialEq, Eq)]
struct TableEntry {
    /// `major:minor`.
    device: String,
    directory: PathBuf,
    /// The file system's type.
    kind: String,
    source: String,
}

fn read_table() -> Result<Vec<u8>> {
    fs::read(MOUNT_TABLE).map_err(|error| Error::from(error).context(MOUNT_TABLE))
}

fn topmost(directory: &Path) -> Result<Option<TableEntry>> {
    Ok(find_in_table(&read_table()?, directory))
}

/// proc_pid_mountinfo(5): `id parent major:minor root mount-point options tags... - type source ...`; later lines lie
/// on top.
fn entries(table: &[u8]) -> impl Iterator<Item = TableEntry> {
    table.split(|byte| *byte == b'\n').filter_map(|line| {
        let mut fields = line.split(|byte| *byte == b' ').skip(2);
        let (device, path) = (fields.next()?, fields.nth(1)?);
        let mut fields = fields.skip_while(|field| *field != b"-").skip(1);
        let mut text = || String::from_utf8_lossy(&unescape(fields.next().unwrap_or_default())).into_owned();
        let directory = OsString::from_vec(unescape(path)).into();
        let device = String::from_utf8_lossy(device).into_owned();
        Some(TableEntry { device, directory, kind: text(), source: text() })
    })
}

fn find_in_table(table: &[u8], directory: &Path) -> Option<TableEntry> {
    entries(table).filter(|entry| entry.directory == directory).last()
}

fn own_in_table(table: &[u8]) -> Vec<OwnMount> {
    let on_top: BTreeMap<_, _> = entries(table).map(|entry| (entry.directory.clone(), entry)).collect();
    let own = on_top.into_values().filter(|entry| entry.kind == OWN_TYPE);
    own.map(|TableEntry { directory, source, device, .. }| OwnMount { directory, source, device }).collect()
}

/// Space, tab, newline and backslash are written as three octal digits.
fn unescape(field: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((first, after)) = rest.split_first() {
        let octal =
            after.get(..3).filter(|_| *first == b'\\').and_then(|digits| std::str::from_utf8(digits).ok());
        match octal.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) => {
                plain.push(byte);
                rest = &after[3..];
            }
            None => {
                plain.push(*first);
                rest = after;
            }
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(path: &Path, kind: ErrorKind, message: &str, hint: &str) {
        let failure = MountPoint::parse(path).expect_err("must be refused");
        assert_eq!(failure.kind(), kind, "{failure}");
        assert!(failure.message().contains(message), "{failure}");
        assert!(failure.hint().expect("a hint").contains(hint), "{:?}", failure.hint());
    }

    #[test]
    fn what_cannot_be_mounted_on_is_refused_with_a_hint() {
        let scratch = tempfile::tempdir().expect("scratch");
        let file = scratch.path().join("file");
        fs::write(&file, b"x").expect("file");
        check(&scratch.path().join("none"), ErrorKind::NotFound, "does not exist", "mkdir -p");
        check(&file, ErrorKind::NotDirectory, "not a directory", "empty directory");
        check(Path::new("/proc"), ErrorKind::Exists, "busy", "umount /proc");
        assert!(MountPoint::parse(Path::new("/dev/fd/x")).is_err());
    }

    #[test]
    fn directories_and_devices_are_told_apart() {
        let scratch = tempfile::tempdir().expect("scratch");
        let real = fs::canonicalize(scratch.path()).expect("real path");
        assert_eq!(MountPoint::parse(scratch.path()).expect("directory"), MountPoint::Directory(real));
        assert_eq!(MountPoint::parse(Path::new("/dev/fd/7")).expect("device"), MountPoint::Device(7));
    }

    #[test]
    fn the_mount_table_is_read_with_its_escapes_and_its_order() {
        let table =
            b"22 1 0:20 / /a\\040b rw - fuse x rw\n23 22 0:21 / /a\\040b rw shared:7 - fuse.forebay s3://y/\\0401 rw\n\
              24 1 8:1 / /c rw\n25 1 0:22 / /d rw - fuse.forebay z rw\n26 25 8:1 / /d rw - ext4 /dev/a rw\n";
        let found = |path: &str| {
            let entry = find_in_table(table, Path::new(path))?;
            Some(format!("{} {} {}", entry.device, entry.kind, entry.source))
        };
        assert_eq!(found("/a b").as_deref(), Some("0:21 fuse.forebay s3://y/ 1"));
        assert_eq!(found("/c").as_deref(), Some("8:1  "));
        assert_eq!(found("/a"), None);
        // One that lies below another file system is nobody's to see.
        let own = OwnMount { directory: "/a b".into(), source: "s3://y/ 1".into(), device: "0:21".into() };
        assert_eq!(own_in_table(table), [own]);
        assert_eq!(unescape(b"/x\\134y\\12"), b"/x\\y\\12");
    }
}
