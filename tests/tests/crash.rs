//! A mount that is killed in the middle of a load, again and again: what was synced is there, nothing is half there.

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use forebay_io::object::Bucket;
use forebay_tests::s3::Server;
use forebay_tests::settings::skip;
use forebay_tests::{Door, Forebay, Manner, Mount, Scratch, Seeded, TestBucket, require_fuse, scale};
use futures::StreamExt;
use rand::rngs::StdRng;
use rand::{Rng, RngExt, SeedableRng};
use rustix::fs::{CWD, FallocateFlags, RenameFlags, copy_file_range, fallocate, renameat_with};

#[path = "crash/power.rs"]
mod power;

use power::PowerDisk;

/// Rounds of one suite: enough for each kind of death to come about in the gate, and ten times as many in a long run.
fn rounds() -> usize {
    (10 * scale()).max(20)
}

/// Rounds of a suite that differs from one of those in how bytes are written: fewer in the gate, as many in a long run.
fn variant_rounds() -> usize {
    if scale() == 1 { 6 } else { rounds() }
}

/// What a mount that was killed leaves, and all that may be wrong with a volume before gc has freed it. What is
/// staged is none of it: fsck through a mount uploads that first.
const LEFT_BY_THE_DEAD: &[&str] = &["leaked-blob", "leaked-uploads"];
/// How many requests of 100 are in trouble, in the rounds of it.
const TROUBLED_PERCENT: u32 = 10;
/// Threads that write at once, each in a directory of its own.
const WRITERS: usize = 3;
/// Longest that the first fsync of a round may take.
const DEADLINE: Duration = Duration::from_secs(120);
/// Few names, so that operations meet; the same in both directories, which take each other's place.
const NAMES: [&str; 8] = ["a", "b", "c c", "ü", "x/a", "x/ü", "y/a", "y/ü"];
/// The directories among them. They are there as long as nobody is in between of moving one.
const DIRECTORIES: [&str; 2] = ["x", "y"];

/// Most descriptors that a writer keeps open.
const HELD: usize = 3;
/// Lengths of what leaves for the store before it is synced.
const STREAMED: Range<usize> = 8 << 20..10 << 20;

/// A directory's files: for each name which file it is, for each file its bytes.
#[derive(Debug, Clone, Default)]
struct State {
    names: BTreeMap<&'static str, usize>,
    files: BTreeMap<usize, Arc<Vec<u8>>>,
    /// Of files that were written through a descriptor which is open still: what they held from the last fsync or close
    /// on, any of which they may be found to hold.
    earlier: BTreeMap<usize, Vec<Arc<Vec<u8>>>>,
}

impl State {
    /// What a reader sees.
    fn seen(&self) -> BTreeMap<&str, &[u8]> {
        self.names.iter().map(|(name, file)| (*name, &self.files[file][..])).collect()
    }

    fn content(&self, file: usize) -> Vec<u8> {
        self.files[&file].to_vec()
    }

    /// Whether a crash may leave these bytes in the file.
    fn may_hold(&self, file: usize, bytes: &[u8]) -> bool {
        let earlier = self.earlier.get(&file).into_iter().flatten();
        earlier.chain(self.files.get(&file)).any(|known| known[..] == *bytes)
    }

    /// This state as a crash left it, if `seen` is that: the same names, and for each file one content that it may have.
    fn left_as(&self, seen: &BTreeMap<&str, &[u8]>) -> Option<Self> {
        let mut found = Self { names: self.names.clone(), ..Self::default() };
        for (name, file) in &self.names {
            let bytes = *seen.get(name)?;
            let known = found.files.entry(*file).or_insert_with(|| Arc::new(bytes.to_vec()));
            if known[..] != *bytes || !self.may_hold(*file, bytes) {
                return None;
            }
        }
        (seen.len() == self.names.len()).then_some(found)
    }
}

/// `bytes` written over `content`.
fn laid_over(mut content: Vec<u8>, offset: usize, bytes: &[u8]) -> Vec<u8> {
    let end = offset + bytes.len();
    content.resize(content.len().max(end), 0);
    content[offset..end].copy_from_slice(bytes);
    content
}

/// The same name in the other directory; a name in none stays.
fn turned(name: &'static str) -> &'static str {
    let Some((directory, rest)) = name.split_once('/') else { return name };
    let is_other =
        |known: &&str| known.split_once('/').is_some_and(|(at, name)| at != directory && name == rest);
    NAMES.into_iter().find(is_other).expect("both directories have the same names")
}

#[derive(Debug)]
enum Operation {
    Replace(&'static str, Vec<u8>),
    Write(&'static str, usize, Vec<u8>),
    Truncate(&'static str, usize),
    /// Makes a hole.
    Punch(&'static str, Range<usize>),
    /// copy_file_range of a whole file to an offset of another one.
    Copy(&'static str, &'static str, usize),
    Rename(&'static str, &'static str),
    /// Two names change places.
    Exchange(&'static str, &'static str),
    /// The directories change places: the first is moved over the second where that is empty.
    Turn,
    Link(&'static str, &'static str),
    Unlink(&'static str),
    Sync(&'static str),
    /// Writes, syncs through the same descriptor, writes more, and does not close.
    Hold(&'static str, Part, Part),
    /// The same of a new content, front to back.
    Begin(&'static str, Vec<u8>, Vec<u8>),
    /// Writes through a descriptor that is open, and does not sync.
    Add(usize, Part),
    /// Closes a descriptor that is open.
    Close(usize),
}

impl Operation {
    /// Whether an fsync has returned when it has.
    fn is_synced(&self) -> bool {
        matches!(self, Self::Sync(_) | Self::Hold(..) | Self::Begin(..))
    }
}

/// Bytes, and the offset that they are written to.
type Part = (usize, Vec<u8>);

fn bytes(rng: &mut StdRng) -> Vec<u8> {
    let length = match rng.random_range(0..20) {
        0..14 => rng.random_range(1..20_000),
        14..19 => rng.random_range(20_000..400_000),
        _ => rng.random_range(5 << 20..9 << 20),
    };
    some_bytes(rng, length..length + 1)
}

fn some_bytes(rng: &mut StdRng, lengths: Range<usize>) -> Vec<u8> {
    let mut bytes = vec![0; rng.random_range(lengths)];
    rng.fill_bytes(&mut bytes);
    bytes
}

fn operation(rng: &mut StdRng) -> Operation {
    let name = |rng: &mut dyn Rng| NAMES[rng.next_u32() as usize % NAMES.len()];
    let part = |rng: &mut StdRng| (rng.random_range(0..300_000), bytes(rng));
    match rng.random_range(0..100) {
        0..16 => Operation::Replace(name(rng), bytes(rng)),
        16..28 => Operation::Write(name(rng), rng.random_range(0..300_000), bytes(rng)),
        28..34 => Operation::Truncate(name(rng), rng.random_range(0..300_000)),
        34..39 => {
            let start = rng.random_range(0..300_000);
            Operation::Punch(name(rng), start..start + rng.random_range(1..100_000))
        }
        39..44 => Operation::Copy(name(rng), name(rng), rng.random_range(0..3) * 70_000),
        44..51 => Operation::Rename(name(rng), name(rng)),
        51..55 => Operation::Exchange(name(rng), name(rng)),
        55..58 => Operation::Turn,
        58..64 => Operation::Link(name(rng), name(rng)),
        64..70 => Operation::Unlink(name(rng)),
        70..78 => Operation::Hold(name(rng), part(rng), part(rng)),
        78..83 if rng.random_range(0..8) == 0 => {
            Operation::Begin(name(rng), some_bytes(rng, STREAMED), bytes(rng))
        }
        78..83 => Operation::Begin(name(rng), bytes(rng), bytes(rng)),
        83..87 => Operation::Add(rng.random_range(0..HELD), part(rng)),
        87..91 => Operation::Close(rng.random_range(0..HELD)),
        _ => Operation::Sync(name(rng)),
    }
}

/// One directory and all that it may be found to hold after a crash.
struct Writer {
    folder: PathBuf,
    rng: StdRng,
    /// The states since the last fsync that was acknowledged, oldest first: the tree commits in order, so that a crash
    /// leaves one of them, perhaps with objects that came after it. The steps of a call that was never answered are
    /// among them.
    history: Vec<State>,
    /// All contents that any file ever had, by hash, and when.
    contents: HashMap<blake3::Hash, String>,
    /// Descriptors that are open for writing, of which file.
    held: Vec<(usize, File)>,
    /// How often something was written.
    written: usize,
    round: usize,
    files: usize,
}

impl Writer {
    fn new(folder: PathBuf, seed: u64) -> Self {
        let contents = HashMap::from([(blake3::hash(b""), "empty".to_owned())]);
        let (rng, history) = (StdRng::seed_from_u64(seed), vec![State::default()]);
        Self { folder, rng, history, contents, held: Vec::new(), written: 0, round: 0, files: 0 }
    }

    fn state(&self) -> &State {
        self.history.last().expect("there is always a state")
    }

    /// Forgets all states but that at `at`.
    fn settle(&mut self, at: usize) {
        let state = self.history.swap_remove(at);
        self.history = vec![state];
    }

    /// The file of a name, which is made if there is none.
    fn made(&mut self, name: &'static str) -> usize {
        if let Some(file) = self.state().names.get(name) {
            return *file;
        }
        let mut state = self.state().clone();
        self.files += 1;
        state.names.insert(name, self.files);
        state.files.insert(self.files, Arc::default());
        self.history.push(state);
        self.files
    }

    /// The bytes of a file become `bytes`, and are committed.
    fn step_to(&mut self, file: usize, bytes: Vec<u8>) {
        self.step_in(file, bytes);
        self.step_committed(file);
    }

    /// The bytes of a file become `bytes`, which may be lost as long as it is neither synced nor closed.
    fn step_in(&mut self, file: usize, bytes: Vec<u8>) {
        let mut state = self.state().clone();
        self.written += 1;
        let when = format!("write {} of round {}, to {file}", self.written, self.round);
        self.contents.entry(blake3::hash(&bytes)).or_insert(when);
        let before = state.files.insert(file, Arc::new(bytes));
        state.earlier.entry(file).or_default().extend(before);
        self.history.push(state);
    }

    /// Somebody syncs or closes a file.
    fn step_committed(&mut self, file: usize) {
        let mut state = self.state().clone();
        if state.earlier.remove(&file).is_some() {
            self.history.push(state);
        }
    }

    /// The names change.
    fn step(&mut self, change: impl FnOnce(&mut BTreeMap<&'static str, usize>)) {
        let mut state = self.state().clone();
        change(&mut state.names);
        self.history.push(state);
    }

    /// Works until the mount is gone, counting in `synced` how often fsync returned. Nothing fails before it is `killed`.
    fn work(&mut self, synced: &AtomicUsize, killed: &AtomicBool) {
        loop {
            let operation = operation(&mut self.rng);
            if !self.note(&operation) {
                continue;
            }
            match self.perform(&operation) {
                Ok(()) if operation.is_synced() => {
                    synced.fetch_add(1, Ordering::Relaxed);
                    self.settle(self.history.len() - 1);
                }
                Ok(()) => {}
                Err(error) => {
                    // The daemon died under the call, or before it.
                    let died = [libc::ENOTCONN, libc::ECONNABORTED, libc::EIO, libc::EINTR, libc::ENOENT];
                    let code = error.raw_os_error().unwrap_or_default();
                    assert!(died.contains(&code), "{operation:.100?}: {error}");
                    assert!(killed.load(Ordering::SeqCst), "the mount lives, and {operation:.100?}: {error}");
                    return self.held.clear();
                }
            }
        }
    }

    fn file(&self, name: &str) -> Option<usize> {
        self.state().names.get(name).copied()
    }

    /// Notes what may come of an operation; false when nothing can.
    fn note(&mut self, operation: &Operation) -> bool {
        match operation {
            Operation::Rename(..) | Operation::Exchange(..) | Operation::Turn => self.note_names(operation),
            Operation::Link(..) | Operation::Unlink(_) => self.note_names(operation),
            Operation::Hold(..) | Operation::Begin(..) | Operation::Add(..) | Operation::Close(_) => {
                self.note_held(operation)
            }
            _ => self.note_bytes(operation),
        }
    }

    /// Of those that open a file, change its bytes, and close it, or sync it.
    fn note_bytes(&mut self, operation: &Operation) -> bool {
        let file = |name: &str| self.file(name);
        match *operation {
            Operation::Replace(name, ref bytes) => {
                let file = self.made(name);
                self.step_in(file, Vec::new());
                self.step_to(file, bytes.clone());
            }
            Operation::Write(name, offset, ref bytes) => {
                let file = self.made(name);
                self.step_to(file, laid_over(self.state().content(file), offset, bytes));
            }
            Operation::Truncate(name, size) => {
                let Some(file) = file(name) else { return false };
                let mut content = self.state().content(file);
                content.resize(size, 0);
                self.step_to(file, content);
            }
            Operation::Punch(name, Range { start, end }) => {
                let Some(file) = file(name) else { return false };
                let mut content = self.state().content(file);
                let size = content.len();
                content[start.min(size)..end.min(size)].fill(0);
                self.step_to(file, content);
            }
            Operation::Copy(from, to, at) => {
                let Some(source) = file(from).filter(|source| file(to) != Some(*source)) else {
                    return false;
                };
                let (file, bytes) = (self.made(to), self.state().content(source));
                let content = match bytes.is_empty() {
                    true => self.state().content(file),
                    false => laid_over(self.state().content(file), at, &bytes),
                };
                self.step_to(file, content);
            }
            Operation::Sync(name) => match file(name) {
                Some(file) => self.step_committed(file),
                None => return false,
            },
            _ => unreachable!("{operation:?} is of another kind"),
        }
        true
    }

    /// Of those that change names.
    fn note_names(&mut self, operation: &Operation) -> bool {
        let file = |name: &str| self.file(name);
        match *operation {
            Operation::Rename(from, to) => match (file(from), file(to)) {
                (None, _) => return false,
                // Two names of one file: nothing happens.
                (Some(from), Some(to)) if from == to => {}
                (Some(file), _) => self.step(|names| {
                    names.remove(from);
                    names.insert(to, file);
                }),
            },
            Operation::Exchange(from, to) => match (file(from), file(to)) {
                (Some(first), Some(second)) => self.step(|names| {
                    names.insert(to, first);
                    names.insert(from, second);
                }),
                _ => return false,
            },
            Operation::Turn if self.has_names_in(DIRECTORIES[0]) || self.has_names_in(DIRECTORIES[1]) => {
                self.step(|names| *names = names.iter().map(|(name, file)| (turned(name), *file)).collect());
            }
            Operation::Turn => return false,
            Operation::Link(from, to) => match (file(from), file(to)) {
                (Some(file), None) => self.step(|names| _ = names.insert(to, file)),
                _ => return false,
            },
            Operation::Unlink(name) if file(name).is_some() => self.step(|names| _ = names.remove(name)),
            Operation::Unlink(_) => return false,
            _ => unreachable!("{operation:?} is of another kind"),
        }
        true
    }

    fn has_names_in(&self, directory: &str) -> bool {
        let within = |name: &&str| name.split_once('/').is_some_and(|(known, _)| known == directory);
        self.state().names.keys().any(within)
    }

    /// Of those that leave a file open, or find it so.
    fn note_held(&mut self, operation: &Operation) -> bool {
        let file = |name: &str| self.file(name);
        match *operation {
            Operation::Hold(name, (at, ref bytes), (later_at, ref later)) => {
                if self.held.len() == HELD && !file(name).is_some_and(|file| self.holds(file)) {
                    return false;
                }
                let file = self.made(name);
                self.step_to(file, laid_over(self.state().content(file), at, bytes));
                self.step_in(file, laid_over(self.state().content(file), later_at, later));
            }
            Operation::Begin(name, ref bytes, ref later) => {
                if self.held.len() == HELD {
                    return false;
                }
                let file = self.made(name);
                self.step_in(file, Vec::new());
                self.step_to(file, bytes.clone());
                self.step_in(file, [&bytes[..], later].concat());
            }
            Operation::Add(which, (at, ref bytes)) => match self.held.get(which) {
                Some(&(file, _)) => self.step_in(file, laid_over(self.state().content(file), at, bytes)),
                None => return false,
            },
            Operation::Close(which) => match self.held.get(which) {
                Some(&(file, _)) => self.step_committed(file),
                None => return false,
            },
            _ => unreachable!("{operation:?} is of another kind"),
        }
        true
    }

    fn holds(&self, file: usize) -> bool {
        self.held.iter().any(|(held, _)| *held == file)
    }

    fn perform(&mut self, operation: &Operation) -> io::Result<()> {
        let path = |name: &str| self.folder.join(name);
        match operation {
            Operation::Replace(name, bytes) => fs::write(path(name), bytes),
            Operation::Write(name, offset, bytes) => {
                let file = OpenOptions::new().write(true).create(true).truncate(false).open(path(name))?;
                file.write_all_at(bytes, *offset as u64)
            }
            Operation::Truncate(name, size) => {
                OpenOptions::new().write(true).open(path(name))?.set_len(*size as u64)
            }
            Operation::Punch(name, range) => {
                let file = OpenOptions::new().write(true).open(path(name))?;
                let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                Ok(fallocate(file, mode, range.start as u64, range.len() as u64)?)
            }
            Operation::Copy(from, to, at) => {
                let source = File::open(path(from))?;
                let target = OpenOptions::new().write(true).create(true).truncate(false).open(path(to))?;
                let size = self.state().content(self.state().names[from]).len();
                let (mut read, mut written) = (0, *at as u64);
                while read < size as u64 {
                    let left = size - read as usize;
                    let copied =
                        copy_file_range(&source, Some(&mut read), &target, Some(&mut written), left)?;
                    assert!(copied > 0, "{from} ends {left} bytes too early");
                }
                Ok(())
            }
            Operation::Rename(from, to) => fs::rename(path(from), path(to)),
            Operation::Exchange(from, to) => {
                Ok(renameat_with(CWD, path(from), CWD, path(to), RenameFlags::EXCHANGE)?)
            }
            Operation::Turn => {
                let [first, second] = DIRECTORIES.map(path);
                // What is in the first one now was in the second one before.
                if self.has_names_in(DIRECTORIES[0]) {
                    return Ok(renameat_with(CWD, first, CWD, second, RenameFlags::EXCHANGE)?);
                }
                fs::rename(&first, second)?;
                fs::create_dir(first)
            }
            Operation::Link(from, to) => fs::hard_link(path(from), path(to)),
            Operation::Unlink(name) => fs::remove_file(path(name)),
            Operation::Sync(name) => File::open(path(name))?.sync_all(),
            _ => self.perform_held(operation),
        }
    }

    fn perform_held(&mut self, operation: &Operation) -> io::Result<()> {
        let path = |name: &str| self.folder.join(name);
        match operation {
            Operation::Hold(name, (at, bytes), (later_at, later)) => {
                let file = self.state().names[name];
                if !self.holds(file) {
                    let opened =
                        OpenOptions::new().write(true).create(true).truncate(false).open(path(name))?;
                    self.held.push((file, opened));
                }
                let (_, open) = self.held.iter().find(|(held, _)| *held == file).expect("it is open now");
                open.write_all_at(bytes, *at as u64)?;
                open.sync_all()?;
                open.write_all_at(later, *later_at as u64)
            }
            Operation::Begin(name, bytes, later) => {
                let mut opened = File::create(path(name))?;
                opened.write_all(bytes)?;
                opened.sync_all()?;
                opened.write_all(later)?;
                self.held.push((self.state().names[name], opened));
                Ok(())
            }
            Operation::Add(which, (at, bytes)) => self.held[*which].1.write_all_at(bytes, *at as u64),
            Operation::Close(which) => {
                drop(self.held.remove(*which));
                Ok(())
            }
            _ => unreachable!("{operation:?} is of another kind"),
        }
    }

    /// Makes the directories that are missing: a kill leaves one less while one is moved.
    fn make_directories(&self) {
        for directory in DIRECTORIES {
            fs::create_dir_all(self.folder.join(directory)).expect("a directory");
        }
    }

    /// Holds what is there now to what may be there, and goes on from it.
    #[track_caller]
    fn check(&mut self, round: usize) {
        self.round = round + 1;
        let mut found = BTreeMap::new();
        assert!(self.folder.is_dir(), "{} was synced", self.folder.display());
        self.make_directories();
        for directory in [""].into_iter().chain(DIRECTORIES) {
            for entry in fs::read_dir(self.folder.join(directory)).expect("a directory") {
                let path = entry.expect("an entry").path();
                let name =
                    path.strip_prefix(&self.folder).ok().and_then(Path::to_str).expect("a name of ours");
                if !DIRECTORIES.contains(&name) {
                    let bytes = fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
                    found.insert(name.to_owned(), bytes);
                }
            }
        }
        let seen: BTreeMap<&str, &[u8]> =
            found.iter().map(|(name, bytes)| (name.as_str(), &bytes[..])).collect();
        let left = self.history.iter().rev().find_map(|state| state.left_as(&seen));
        match left.or_else(|| (0..self.history.len()).rev().find_map(|at| self.overtaken(at, &seen))) {
            Some(state) => self.history = vec![state],
            None => panic!("round {round}: {}", self.story(&seen)),
        }
    }

    /// The state at `at` with files that a later close had brought into the bucket before the tree was durable: such an
    /// object is found, and the changes of names before it are not. `None` when `seen` is not that.
    fn overtaken(&mut self, at: usize, seen: &BTreeMap<&str, &[u8]>) -> Option<State> {
        let (state, later) = (&self.history[at], &self.history[at + 1..]);
        let came = |name: &str, bytes: &[u8]| {
            later.iter().any(|state| state.names.get(name).is_some_and(|file| state.may_hold(*file, bytes)))
        };
        let mut found = State::default();
        for (name, file) in &state.names {
            let bytes = *seen.get(name)?;
            let mut names = state.names.iter().filter(|(_, other)| *other == file).map(|(name, _)| name);
            let is_whole = names.all(|name| seen.get(name) == Some(&bytes));
            let is_one = found.files.get(file).is_none_or(|known| known[..] == *bytes);
            if is_one && state.may_hold(*file, bytes) || is_whole && came(name, bytes) {
                found.names.insert(*name, *file);
                found.files.insert(*file, Arc::new(bytes.to_vec()));
                continue;
            }
            // One of the names became another file's before.
            self.files += 1;
            came(name, bytes).then(|| found.names.insert(*name, self.files))?;
            found.files.insert(self.files, Arc::new(bytes.to_vec()));
        }
        for (name, bytes) in seen.iter().filter(|(name, _)| !state.names.contains_key(**name)) {
            let name = NAMES.iter().find(|known| *known == name).filter(|_| came(name, bytes))?;
            self.files += 1;
            found.names.insert(*name, self.files);
            found.files.insert(self.files, Arc::new(bytes.to_vec()));
        }
        Some(found)
    }

    /// A directory in a state that it never had, in words.
    fn story(&self, seen: &BTreeMap<&str, &[u8]>) -> String {
        let short = |state: &BTreeMap<&str, &[u8]>| {
            let file = |(name, bytes): (&&str, &&[u8])| {
                format!("{name}: {} {}", bytes.len(), &blake3::hash(bytes).to_hex()[..6])
            };
            state.iter().map(file).collect::<Vec<_>>().join(", ")
        };
        let states = self.history.iter().map(|state| {
            let earlier = state.names.iter().flat_map(|(name, file)| {
                let earlier = state.earlier.get(file).into_iter().flatten();
                earlier.map(move |bytes| short(&BTreeMap::from([(*name, &bytes[..])])))
            });
            [short(&state.seen())].into_iter().chain(earlier).collect::<Vec<_>>().join(" or ")
        });
        let states: Vec<_> = states.collect();
        let origin = |(name, bytes): (&&str, &&[u8])| {
            let when = self.contents.get(&blake3::hash(bytes)).map_or("nobody wrote that", |when| when);
            format!("{name}: {when}")
        };
        let origins: Vec<_> = seen.iter().map(origin).collect();
        let (folder, seen) = (self.folder.display(), short(seen));
        format!("{folder} holds\n{seen}\nnone of\n{}\n{}", states.join("\n"), origins.join("\n"))
    }
}

/// Promise S4: When fsync returns, the file's bytes and its name are in the bucket: killing the mount and losing its
/// disk loses none of them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_load_that_is_killed_keeps_what_was_synced() {
    if require_fuse("a_load_that_is_killed_keeps_what_was_synced") {
        let scratch = Scratch::new();
        let bucket = TestBucket::folder(&scratch.folder("bucket")).await;
        let load = Load::of(&scratch, rounds());
        load_and_kill(&bucket, || {}, load).await;
    }
}

/// So they are where small files share segments, also when one is compacted in the very moment.
///
/// Promise S4: When fsync returns, the file's bytes and its name are in the bucket
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_load_on_packed_directories_that_is_killed_keeps_what_was_synced() {
    if require_fuse("a_load_on_packed_directories_that_is_killed_keeps_what_was_synced") {
        let scratch = Scratch::new();
        let bucket = TestBucket::folder(&scratch.folder("bucket")).await;
        let load = Load { is_packed: true, ..Load::of(&scratch, variant_rounds()) };
        load_and_kill(&bucket, || {}, load).await;
    }
}

/// And where they are staged before that.
///
/// Promise S61: With `--writeback`, when fsync returns, the file's bytes and its name survive the death of the mount
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_load_on_packed_directories_that_is_written_back_and_killed_keeps_what_was_synced() {
    if require_fuse("a_load_on_packed_directories_that_is_written_back_and_killed_keeps_what_was_synced") {
        let (scratch, home) = (Scratch::new(), written_back_soon());
        let bucket = TestBucket::folder(&scratch.folder("bucket")).await;
        let load = Load { is_packed: true, options: WRITEBACK, ..Load::of(&home, variant_rounds()) };
        load_and_kill(&bucket, || {}, load).await;
    }
}

/// Promise S61: With `--writeback`, when fsync returns, the file's bytes and its name survive the death of the mount
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_load_that_is_written_back_and_killed_keeps_what_was_synced() {
    if require_fuse("a_load_that_is_written_back_and_killed_keeps_what_was_synced") {
        let (scratch, home) = (Scratch::new(), written_back_soon());
        let bucket = TestBucket::folder(&scratch.folder("bucket")).await;
        let load = Load { options: WRITEBACK, ..Load::of(&home, variant_rounds()) };
        load_and_kill(&bucket, || {}, load).await;
    }
}

/// Promise S61: With `--writeback`, when fsync returns, the file's bytes and its name survive the death of the mount
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_load_on_s3_that_is_written_back_and_killed_keeps_what_was_synced() {
    if require_fuse("a_load_on_s3_that_is_written_back_and_killed_keeps_what_was_synced") {
        let (server, home) = (Server::for_volume(), written_back_soon());
        if !server.keeps_objects() {
            let why = "only a server that keeps its objects ends the requests of a killed mount";
            return skip("a_load_on_s3_that_is_written_back_and_killed_keeps_what_was_synced", why);
        }
        let bucket = server.bucket("a/prefix").await;
        let options = [WRITEBACK, &["--take-over"]].concat();
        load_and_kill_over_s3(
            &server,
            &bucket,
            Load { options: &options, ..Load::of(&home, variant_rounds()) },
        )
        .await;
    }
}

/// Promise S61: and a failure of power: the next mount with the same state directory reads and uploads them. Neither leaves
/// a file whose bytes are missing, synced or not: no name is durable before the bytes that it leads to.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_load_staged_on_a_disk_whose_power_fails_keeps_what_was_synced() {
    if require_fuse("a_load_staged_on_a_disk_whose_power_fails_keeps_what_was_synced") {
        let (scratch, home) = (Scratch::new(), written_back_soon());
        let bucket = TestBucket::folder(&scratch.folder("bucket")).await;
        let mut disk = PowerDisk::mount(scratch.folder("disk"));
        let folder = disk.path().join("staging");
        fs::create_dir(&folder).and_then(|()| File::open(disk.path())?.sync_all()).expect("a folder");
        let state = home.folder("home/state/forebay");
        std::os::unix::fs::symlink(&folder, state.join("staging")).expect("a link");
        let load = Load { options: WRITEBACK, ..Load::of(&home, variant_rounds()) };
        load_and_kill(&bucket, || disk.fail(), load).await;
    }
}

/// Little enough for the load to reach the ceiling now and then.
const WRITEBACK: &[&str] = &["--writeback", "--writeback-size", "16MiB"];

/// A place with a home whose mounts upload at any time, in the middle of a load, too.
fn written_back_soon() -> Scratch {
    let scratch = Scratch::new();
    let settings = "[volume.writeback]\ndelay_ms = 20\nopen_ms = 50\n";
    fs::write(scratch.folder("home/config/forebay").join("forebay.toml"), settings).expect("settings");
    scratch
}

/// Promise S4: When fsync returns, the file's bytes and its name are in the bucket
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_load_on_s3_that_is_killed_keeps_what_was_synced() {
    if require_fuse("a_load_on_s3_that_is_killed_keeps_what_was_synced") {
        let server = Server::for_volume();
        if !server.keeps_objects() {
            let why = "only a server that keeps its objects ends the requests of a killed mount";
            return skip("a_load_on_s3_that_is_killed_keeps_what_was_synced", why);
        }
        let bucket = server.bucket("a/prefix").await;
        let scratch = Scratch::new();
        let load = Load { options: &["--take-over"], ..Load::of(&scratch, rounds()) };
        load_and_kill_over_s3(&server, &bucket, load).await;
    }
}

/// Promise S4: When fsync returns, the file's bytes and its name are in the bucket
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_load_on_a_disk_whose_power_fails_keeps_what_was_synced() {
    if require_fuse("a_load_on_a_disk_whose_power_fails_keeps_what_was_synced") {
        let scratch = Scratch::new();
        let mut disk = PowerDisk::mount(scratch.folder("disk"));
        let folder = disk.path().join("bucket");
        fs::create_dir(&folder).and_then(|()| File::open(disk.path())?.sync_all()).expect("a folder");
        let bucket = TestBucket::folder(&folder).await;
        let home = Scratch::new();
        load_and_kill(&bucket, || disk.fail(), Load::of(&home, rounds())).await;
    }
}

/// What is mounted and killed.
struct Load<'a> {
    /// Where the mount has its home. Unless it writes back, it loses that in every second round.
    scratch: &'a Scratch,
    /// Small files share segments, and are compacted while they are written.
    is_packed: bool,
    options: &'a [&'a str],
    variables: &'a [(String, String)],
    /// What all requests go through; in every third round, from its load to the next one's, they are in trouble.
    door: Option<&'a Door>,
    rounds: usize,
}

impl<'a> Load<'a> {
    fn of(scratch: &'a Scratch, rounds: usize) -> Self {
        Self { scratch, is_packed: false, options: &[], variables: &[], door: None, rounds }
    }
}

/// The same where the store fails, delays, refuses and loses answers in every third round.
async fn load_and_kill_over_s3(server: &Server, bucket: &Bucket, load: Load<'_>) {
    let door = Door::new(server.address()).expect("loopback has free ports");
    let variables = server.envs_at(door.endpoint());
    let load = Load { variables: &variables, door: Some(&door), ..load };
    // Requests of the killed mount are over before the next one starts, as they are when its lease has run out.
    let after = || {
        door.forget();
        server.restart();
    };
    load_and_kill(bucket, after, load).await;
}

/// Kills the mount under a load, so many rounds; `after` is what happens to its store then.
async fn load_and_kill(bucket: &Bucket, mut after: impl FnMut(), load: Load<'_>) {
    let Load { scratch, is_packed, options, variables, door, rounds } = load;
    let (mut rng, keeps_state) = (Seeded::new(), options.contains(&"--writeback"));
    let (url, folder) = (bucket.url().to_string(), scratch.join("mnt"));
    let mut home = scratch.join("home");
    let mut mount = Mount::new(&home, &url, &folder, options, variables);
    if is_packed {
        let words = ["volume", "policy", &folder.display().to_string(), "packed"];
        Forebay::new(&home, words).run().succeeded();
    }
    let mut writers: Vec<Writer> =
        (0..WRITERS).map(|index| Writer::new(folder.join(format!("w{index}")), rng.random())).collect();
    for writer in &writers {
        fs::create_dir(&writer.folder).expect("a directory");
        writer.make_directories();
        File::open(&writer.folder).and_then(|folder| folder.sync_all()).expect("it is synced");
    }
    for round in 0..rounds {
        let more = Duration::from_millis(rng.random_range(0..200));
        if let Some(door) = door {
            match round % 3 {
                2 => door.trouble(rng.random(), TROUBLED_PERCENT),
                _ => door.set(Manner::Pass),
            }
        }
        let killed = AtomicBool::new(false);
        let synced: Vec<_> = writers.iter().map(|_| AtomicUsize::new(0)).collect();
        let idle = || synced.iter().any(|synced| synced.load(Ordering::Relaxed) == 0);
        std::thread::scope(|threads| {
            for (writer, synced) in writers.iter_mut().zip(&synced) {
                threads.spawn(|| writer.work(synced, &killed));
            }
            if is_packed {
                // It ends with the mount, if not before.
                threads.spawn(|| drop(Forebay::new(&home, ["gc", &url]).envs(variables).run()));
            }
            let started = Instant::now();
            while idle() && started.elapsed() < DEADLINE {
                std::thread::sleep(Duration::from_millis(1));
            }
            std::thread::sleep(more);
            killed.store(true, Ordering::SeqCst);
            mount.kill();
        });
        assert!(!idle(), "a writer had no fsync returned in round {round}: {synced:?}\n{}", mount.log());
        after();
        check_objects(bucket, &writers).await;
        if !keeps_state && round % 2 == 1 {
            fs::remove_dir_all(&home).expect("the state and the cache go");
            home = scratch.join(&format!("home-{round}"));
        }
        mount.remount(&home);
        check_volume(&home, &url, variables, LEFT_BY_THE_DEAD);
        writers.iter_mut().for_each(|writer| writer.check(round));
    }
    if let Some(door) = door {
        let troubles = door.troubles();
        assert!(troubles.values().sum::<usize>() >= rounds, "the store failed too seldom: {troubles:?}");
        door.set(Manner::Pass);
    }
    check_volume(&home, &url, variables, LEFT_BY_THE_DEAD);
    // Nothing at all is wrong once gc has freed that.
    Forebay::new(&home, ["gc", &url]).envs(variables).run().succeeded();
    check_volume(&home, &url, variables, &[]);
    mount.unmount();
    check_objects(bucket, &writers).await;
}

/// Nothing is wrong with the volume but findings of the kinds in `left`.
#[track_caller]
fn check_volume(home: &Path, url: &str, variables: &[(String, String)], left: &[&str]) {
    let checked = Forebay::new(home, ["fsck", url, "--json"]).envs(variables).run();
    let report: serde_json::Value =
        serde_json::from_str(&checked.stdout).unwrap_or_else(|error| panic!("{error}: {checked}"));
    let findings = report["findings"].as_array().expect("a list");
    for finding in findings {
        assert!(finding["kind"].as_str().is_some_and(|kind| left.contains(&kind)), "{finding}");
    }
    assert_eq!(report["further"], 0, "{checked}");
    assert_eq!(checked.code == Some(0), findings.is_empty(), "{checked}");
}

/// Every plain object holds what some file held at some time, the whole of it.
async fn check_objects(bucket: &Bucket, writers: &[Writer]) {
    let mut listing = std::pin::pin!(bucket.list(""));
    while let Some(info) = listing.next().await {
        let key = info.expect("a listing").key;
        if key.as_str().starts_with(".forebay/") {
            continue;
        }
        let (bytes, _) = bucket.get_whole(&key).await.unwrap_or_else(|error| panic!("{key}: {error}"));
        let hash = blake3::hash(&bytes);
        let known = writers.iter().any(|writer| writer.contents.contains_key(&hash));
        assert!(known, "object {key} of {} bytes is no whole file", bytes.len());
    }
}
