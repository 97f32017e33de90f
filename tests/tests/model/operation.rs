//! What a sequence is made of, and random ones.

use std::fmt;
use std::path::PathBuf;

use forebay_tests::noise;
use rand::{Rng, RngExt};

use super::calls::Kind;

/// Files that a sequence has open at a time.
pub(crate) const SLOTS: usize = 2;
/// Files that programs beside the test have open for their locks, two for each.
pub(crate) const HOLDERS: usize = 4;
/// What a page of a mapping has.
pub(crate) const PAGE: u64 = 4096;

/// Bytes to be written, which are not shown.
#[derive(Clone)]
pub(crate) struct Content(pub Vec<u8>);

impl fmt::Debug for Content {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} random bytes", self.0.len())
    }
}

/// A POSIX access control list: tag, permissions and id of its entries (linux/posix_acl_xattr.h).
#[derive(Debug, Clone)]
pub(crate) struct List(Vec<(u16, u16, u32)>);

impl List {
    pub(crate) const ACCESS: &str = "system.posix_acl_access";
    pub(crate) const DEFAULT: &str = "system.posix_acl_default";

    /// As the value of an attribute. No entries stand for no list.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let entries = self.0.iter().flat_map(|(tag, permissions, id)| {
            [&tag.to_le_bytes()[..], &permissions.to_le_bytes(), &id.to_le_bytes()].concat()
        });
        2u32.to_le_bytes().into_iter().chain(entries).collect()
    }
}

/// What utimens does to one time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Time {
    Keep,
    Now,
    At(i64, u32),
}

/// One operation. Paths are relative to the root; what is open goes by the number of its slot.
#[derive(Debug, Clone)]
#[rustfmt::skip]
pub(crate) enum Operation {
    /// Opens a file in a slot, and closes what was there.
    Open { slot: usize, path: PathBuf, flags: i32, mode: u32 },
    Close { slot: usize },
    ReadAt { slot: usize, offset: u64, length: usize },
    WriteAt { slot: usize, offset: u64, bytes: Content },
    SetSize { slot: usize, size: u64 },
    Sync { slot: usize },
    Allocate { slot: usize, mode: i32, offset: u64, length: u64 },
    Seek { slot: usize, offset: u64, whence: i32 },
    Copy { from: (usize, u64), to: (usize, u64), length: usize },
    Status { slot: usize },

    // What opens a file for itself and closes it.
    Write { path: PathBuf, offset: u64, bytes: Content, sync: bool },
    Append { path: PathBuf, bytes: Content },
    Truncate { path: PathBuf, size: u64 },
    Replace { path: PathBuf, bytes: Content },
    Read { path: PathBuf, offset: u64, length: usize },

    MakeFolder { path: PathBuf, mode: u32 },
    /// A pipe, a socket or a device.
    MakeNode { path: PathBuf, kind: Kind, mode: u32, device: (u32, u32) },
    Symlink { path: PathBuf, target: PathBuf },
    ReadLink { path: PathBuf },
    Link { from: PathBuf, to: PathBuf },
    Remove { path: PathBuf },
    RemoveFolder { path: PathBuf },
    Rename { from: PathBuf, to: PathBuf, flags: u32 },
    List { path: PathBuf },
    Look { path: PathBuf },
    Mode { path: PathBuf, mode: u32 },
    Owner { path: PathBuf, user: Option<u32>, group: Option<u32> },
    Times { path: PathBuf, accessed: Time, modified: Time },
    SetXattr { path: PathBuf, name: &'static str, value: Vec<u8>, flags: i32 },
    Xattr { path: PathBuf, name: &'static str },
    Xattrs { path: PathBuf },
    RemoveXattr { path: PathBuf, name: &'static str },
    SetList { path: PathBuf, name: &'static str, list: List },
    Space { path: PathBuf },

    // On what another program has mapped, shared and to be written.
    Map { path: PathBuf, offset: u64, length: usize },
    /// What of it the file has room for.
    Store { at: usize, bytes: Content },
    Load { at: usize, length: usize },
    SyncMap,
    Unmap,

    // What other programs do and only a kernel answers.
    Take { holder: usize, path: PathBuf },
    Drop { holder: usize },
    /// Of what the holder has open, else of `path`, which it opens.
    Lock { holder: usize, path: PathBuf, kind: &'static str, how: &'static str, range: (u64, u64) },
    May { path: PathBuf, user: u32, group: u32, wanted: i32 },

    /// All trees are compared, before and after the volume is mounted on another machine. Nothing stays open.
    Remount,
}

impl Operation {
    /// Whether no file system is asked for it, or one that asks what others have tested.
    pub(crate) fn is_the_kernels(&self) -> bool {
        matches!(self, Self::Take { .. } | Self::Drop { .. } | Self::Lock { .. } | Self::May { .. })
    }

    /// Has a lock be a process's: where several hosts write all kinds are one, and those of open files end moments after these (S80).
    pub(crate) fn lock_as_a_process(&mut self) {
        if let Self::Lock { kind, .. } = self {
            *kind = "process";
        }
    }
}

/// Operations between two mounts.
const ROUND: usize = 150;

/// `rounds` times random operations, and a remount after each.
pub(crate) fn sequence(rng: &mut impl Rng, rounds: usize) -> Vec<Operation> {
    let round = |_| (0..ROUND).map(|_| operation(rng)).chain([Operation::Remount]).collect::<Vec<_>>();
    (0..rounds).flat_map(round).collect()
}

fn operation(rng: &mut impl Rng) -> Operation {
    match rng.random_range(0..100) {
        0..29 => on_open_file(rng),
        29..48 => on_content(rng),
        48..70 => on_names(rng),
        70..84 => on_attributes(rng),
        84..95 => on_mapping(rng),
        _ => on_others(rng),
    }
}

fn on_open_file(rng: &mut impl Rng) -> Operation {
    let (slot, offset) = (rng.random_range(0..SLOTS), offset(rng));
    match rng.random_range(0..100) {
        0..34 => Operation::Open { slot, path: path(rng), flags: flags(rng), mode: mode(rng) },
        34..38 => Operation::Close { slot },
        38..46 => Operation::ReadAt { slot, offset, length: 100_000 },
        46..62 => Operation::WriteAt { slot, offset, bytes: bytes(rng) },
        62..68 => Operation::SetSize { slot, size: offset },
        68..72 => Operation::Sync { slot },
        72..82 => Operation::Allocate { slot, mode: allocation(rng), offset, length: length(rng) },
        82..88 => Operation::Seek { slot, offset, whence: one_of(rng, &[libc::SEEK_DATA, libc::SEEK_HOLE]) },
        88..95 => {
            let from = (rng.random_range(0..SLOTS), self::offset(rng));
            Operation::Copy { from, to: (slot, offset), length: length(rng) as usize }
        }
        _ => Operation::Status { slot },
    }
}

fn on_content(rng: &mut impl Rng) -> Operation {
    let (path, offset) = (path(rng), offset(rng));
    match rng.random_range(0..60) {
        0..18 => Operation::Write { path, offset, bytes: bytes(rng), sync: rng.random_bool(0.3) },
        18..30 => Operation::Append { path, bytes: bytes(rng) },
        30..37 => Operation::Truncate { path, size: offset },
        37..50 => Operation::Replace { path, bytes: bytes(rng) },
        _ => Operation::Read { path, offset, length: 200_000 },
    }
}

fn on_names(rng: &mut impl Rng) -> Operation {
    let path = path(rng);
    match rng.random_range(0..100) {
        0..28 => Operation::MakeFolder { path: folder(rng), mode: mode(rng) },
        28..30 => {
            let kind =
                one_of(rng, &[Kind::Pipe, Kind::Pipe, Kind::Socket, Kind::CharDevice, Kind::BlockDevice]);
            let device = (one_of(rng, &[0, 1, 259, 4095]), one_of(rng, &[0, 3, 256, 1_048_575]));
            Operation::MakeNode { path, kind, mode: mode(rng), device }
        }
        30..34 => Operation::Symlink { path, target: self::path(rng) },
        34..37 => Operation::ReadLink { path },
        37..50 => Operation::Link { from: path, to: self::path(rng) },
        50..63 => Operation::Remove { path },
        63..69 => Operation::RemoveFolder { path: folder(rng) },
        69..86 => Operation::Rename { from: path, to: self::path(rng), flags: rename_flags(rng) },
        86..94 => Operation::Rename { from: folder(rng), to: folder(rng), flags: rename_flags(rng) },
        _ => Operation::List { path: folder(rng) },
    }
}

fn on_attributes(rng: &mut impl Rng) -> Operation {
    let (path, name) = (path(rng), one_of(rng, &["user.one", "user.two", "trusted.one"]));
    match rng.random_range(0..100) {
        0..17 => Operation::Mode { path, mode: mode(rng) },
        17..27 => {
            let (user, group) = (id(rng), id(rng));
            Operation::Owner { path, user, group }
        }
        27..42 => {
            let (accessed, modified) = (time(rng), time(rng));
            Operation::Times { path, accessed, modified }
        }
        42..54 => {
            let length = one_of(rng, &[0, 1, 30, 3000]);
            let value = noise(rng, length);
            Operation::SetXattr { path, name, value, flags: xattr_flags(rng) }
        }
        54..60 => Operation::Xattr { path, name },
        60..65 => Operation::Xattrs { path },
        65..71 => Operation::RemoveXattr { path, name },
        71..88 => on_list(rng),
        88..98 => Operation::Look { path },
        _ => Operation::Space { path },
    }
}

/// On an access control list. Directories have default ones, which what is made in them takes over.
fn on_list(rng: &mut impl Rng) -> Operation {
    let default = rng.random_bool(0.5);
    let name = if default { List::DEFAULT } else { List::ACCESS };
    let path = if default && rng.random_bool(0.8) { folder(rng) } else { likely(rng) };
    match rng.random_range(0..20) {
        0..15 => Operation::SetList { path, name, list: list(rng) },
        15 => Operation::SetXattr { path, name, value: list(rng).encode(), flags: xattr_flags(rng) },
        16..18 => Operation::Xattr { path, name },
        _ => Operation::RemoveXattr { path, name },
    }
}

/// A list that is right, most of the time.
fn list(rng: &mut impl Rng) -> List {
    const NOBODY: u32 = u32::MAX;
    let permissions = |rng: &mut dyn Rng| rng.random_range(0..8);
    let mut entries = vec![(0x01, permissions(rng), NOBODY)];
    for id in [0, 1000, 4_000_000_000] {
        if rng.random_bool(0.3) {
            entries.push((0x02, permissions(rng), id));
        }
    }
    entries.push((0x04, permissions(rng), NOBODY));
    if rng.random_bool(0.4) {
        entries.push((0x08, permissions(rng), 1000));
    }
    if entries.len() > 2 || rng.random_bool(0.2) {
        entries.push((0x10, permissions(rng), NOBODY));
    }
    entries.push((0x20, permissions(rng), NOBODY));
    let at = rng.random_range(0..entries.len());
    match rng.random_range(0..30) {
        0 => entries.clear(),
        1 => drop(entries.remove(at)),
        2 => entries[at].1 = 8,
        3 => entries.swap(0, at),
        _ => {}
    }
    List(entries)
}

fn xattr_flags(rng: &mut impl Rng) -> i32 {
    let (create, replace) = (libc::XATTR_CREATE, libc::XATTR_REPLACE);
    one_of(rng, &[0, 0, 0, create, create, replace, replace, create | replace])
}

fn on_mapping(rng: &mut impl Rng) -> Operation {
    // Within most mappings, and beyond some.
    let at = if rng.random_bool(0.5) { rng.random_range(0..5000) } else { rng.random_range(0..200_000) };
    match rng.random_range(0..20) {
        0..6 => {
            let pages = one_of(rng, &[0, 0, 0, 1, 17, 100]);
            let length = one_of(rng, &[1, 300_000, 600_000, 2 << 20]);
            Operation::Map { path: likely(rng), offset: pages * PAGE, length }
        }
        6..14 => {
            let length = rng.random_range(1..20_000);
            Operation::Store { at, bytes: Content(noise(rng, length)) }
        }
        14..18 => Operation::Load { at, length: rng.random_range(1..200_000) },
        18 => Operation::SyncMap,
        _ => Operation::Unmap,
    }
}

fn on_others(rng: &mut impl Rng) -> Operation {
    let holder = rng.random_range(0..HOLDERS);
    match rng.random_range(0..20) {
        0..2 => Operation::Take { holder, path: likely(rng) },
        2 => Operation::Drop { holder },
        3..14 => {
            let kind = one_of(rng, &["flock", "process", "file"]);
            let ways: &[_] = &["shared", "alone", "alone", "free", "ask"];
            let how = one_of(rng, if kind == "flock" { &ways[..4] } else { ways });
            // A length of 0 reaches to the end.
            let range = (rng.random_range(0..4) * 10, rng.random_range(0..4) * 10);
            Operation::Lock { holder, path: likely(rng), kind, how, range }
        }
        _ => {
            let (user, group) =
                one_of(rng, &[(1000, 1000), (1000, 0), (4_000_000_000, 1000), (65_534, 65_534)]);
            let path = if rng.random_bool(0.3) { folder(rng) } else { likely(rng) };
            Operation::May { path, user, group, wanted: rng.random_range(0..8) }
        }
    }
}

fn one_of<T: Copy>(rng: &mut impl Rng, choices: &[T]) -> T {
    choices[rng.random_range(0..choices.len())]
}

/// Most directories have these names, and so that paths lead somewhere, few other things do.
const FOLDERS: &[&str] = &["d e", "ü"];

/// Few names, so that operations meet. Now and then one of the greatest length, and one that is longer.
fn path(rng: &mut impl Rng) -> PathBuf {
    let name = match rng.random_range(0..300) {
        0 => "x".repeat(255),
        1 => "x".repeat(256),
        2..30 => one_of(rng, FOLDERS).to_owned(),
        _ => one_of(rng, &["a", "b", "c"]).to_owned(),
    };
    above(rng).join(name)
}

/// Of what is there more often than not: most of what is asked about nothing tells nothing.
fn likely(rng: &mut impl Rng) -> PathBuf {
    if rng.random_bool(0.7) { one_of(rng, &["a", "b", "c"]).into() } else { path(rng) }
}

/// Where a directory is made, or looked for.
fn folder(rng: &mut impl Rng) -> PathBuf {
    let name = if rng.random_bool(0.8) { one_of(rng, FOLDERS) } else { one_of(rng, &["a", "b", "c"]) };
    above(rng).join(name)
}

fn above(rng: &mut impl Rng) -> PathBuf {
    let depth = one_of(rng, &[0, 0, 0, 1, 1, 2]);
    let name = |_| if rng.random_bool(0.9) { one_of(rng, FOLDERS) } else { one_of(rng, &["a", "b", "c"]) };
    (0..depth).map(name).collect()
}

fn bytes(rng: &mut impl Rng) -> Content {
    let length = match rng.random_range(0..10) {
        0 => 0,
        1..7 => rng.random_range(1..5000),
        7..9 => rng.random_range(5000..300_000),
        _ => rng.random_range(4 << 20..9 << 20),
    };
    Content(noise(rng, length))
}

fn offset(rng: &mut impl Rng) -> u64 {
    match rng.random_range(0..4) {
        0 => rng.random_range(0..5000),
        1 => rng.random_range(0..150) * 4096,
        _ => rng.random_range(0..600_000),
    }
}

/// Of a range; now and then none.
fn length(rng: &mut impl Rng) -> u64 {
    match rng.random_range(0..10) {
        0 => 0,
        1..4 => rng.random_range(1..50) * 4096,
        _ => rng.random_range(1..300_000),
    }
}

fn flags(rng: &mut impl Rng) -> i32 {
    let mut flags = one_of(rng, &[libc::O_RDONLY, libc::O_WRONLY, libc::O_RDWR, libc::O_RDWR, libc::O_RDWR]);
    for (flag, chance) in [
        (libc::O_CREAT, 0.8),
        (libc::O_EXCL, 0.1),
        (libc::O_TRUNC, 0.15),
        (libc::O_APPEND, 0.2),
        (libc::O_NOFOLLOW, 0.1),
        (libc::O_DIRECT, 0.15),
    ] {
        if rng.random_bool(chance) {
            flags |= flag;
        }
    }
    match flags & libc::O_CREAT {
        // Without O_CREAT nobody says what O_EXCL means, and with it O_DIRECTORY.
        0 if rng.random_bool(0.1) => (flags & !libc::O_EXCL) | libc::O_DIRECTORY,
        0 => flags & !libc::O_EXCL,
        _ => flags,
    }
}

fn mode(rng: &mut impl Rng) -> u32 {
    let special = one_of(rng, &[0, 0, 0, 0, 0, 0o1000, 0o2000, 0o4000, 0o6000]);
    special | 0o600 | rng.random_range(0..0o200)
}

fn allocation(rng: &mut impl Rng) -> i32 {
    let (keep, punch, zero) =
        (libc::FALLOC_FL_KEEP_SIZE, libc::FALLOC_FL_PUNCH_HOLE, libc::FALLOC_FL_ZERO_RANGE);
    let modes =
        [0, keep, punch | keep, punch | keep, zero, zero | keep, punch, libc::FALLOC_FL_COLLAPSE_RANGE];
    one_of(rng, &modes)
}

fn rename_flags(rng: &mut impl Rng) -> u32 {
    let (refuse, exchange, whiteout) = (libc::RENAME_NOREPLACE, libc::RENAME_EXCHANGE, libc::RENAME_WHITEOUT);
    let common = [0, 0, 0, 0, 0, 0, refuse, refuse, exchange, exchange, exchange, exchange];
    let rare = [whiteout, whiteout, whiteout | refuse, whiteout | exchange, refuse | exchange];
    if rng.random_bool(0.8) { one_of(rng, &common) } else { one_of(rng, &rare) }
}

fn id(rng: &mut impl Rng) -> Option<u32> {
    one_of(rng, &[None, Some(0), Some(1000), Some(4_000_000_000)])
}

/// Times that are set lie in the past, so that they are told from those that the clock gave.
fn time(rng: &mut impl Rng) -> Time {
    match rng.random_range(0..10) {
        0..2 => Time::Keep,
        2 => Time::Now,
        3 => Time::At(-rng.random_range(1..1_000_000_000), rng.random_range(0..1_000_000_000)),
        _ => Time::At(rng.random_range(0..1_500_000_000), rng.random_range(0..1_000_000_000)),
    }
}
