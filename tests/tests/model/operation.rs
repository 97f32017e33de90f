//! What a sequence is made of, and random ones.

use std::fmt;
use std::path::PathBuf;

use rand::{Rng, RngExt};

/// Files that a sequence has open at a time.
pub(crate) const SLOTS: usize = 2;

/// Bytes to be written, which are not shown.
#[derive(Clone)]
pub(crate) struct Content(pub Vec<u8>);

impl fmt::Debug for Content {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} random bytes", self.0.len())
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
    MakePipe { path: PathBuf, mode: u32 },
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
    Space { path: PathBuf },

    /// All trees are compared, before and after the volume is mounted on another machine. Nothing stays open.
    Remount,
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
        0..34 => on_open_file(rng),
        34..58 => on_content(rng),
        58..84 => on_names(rng),
        _ => on_attributes(rng),
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
        28..30 => Operation::MakePipe { path, mode: mode(rng) },
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
        0..20 => Operation::Mode { path, mode: mode(rng) },
        20..32 => {
            let (user, group) = (id(rng), id(rng));
            Operation::Owner { path, user, group }
        }
        32..50 => {
            let (accessed, modified) = (time(rng), time(rng));
            Operation::Times { path, accessed, modified }
        }
        50..68 => {
            let mut value = vec![0; one_of(rng, &[0, 1, 30, 3000])];
            rng.fill_bytes(&mut value);
            let (create, replace) = (libc::XATTR_CREATE, libc::XATTR_REPLACE);
            let flags = one_of(rng, &[0, 0, 0, create, create, replace, replace, create | replace]);
            Operation::SetXattr { path, name, value, flags }
        }
        68..75 => Operation::Xattr { path, name },
        75..80 => Operation::Xattrs { path },
        80..87 => Operation::RemoveXattr { path, name },
        87..98 => Operation::Look { path },
        _ => Operation::Space { path },
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
    let mut bytes = vec![0; length];
    rng.fill_bytes(&mut bytes);
    Content(bytes)
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
    let (refuse, exchange) = (libc::RENAME_NOREPLACE, libc::RENAME_EXCHANGE);
    one_of(rng, &[0, 0, 0, 0, refuse, refuse, exchange, exchange, exchange, refuse | exchange])
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
