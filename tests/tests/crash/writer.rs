//! A writer: what it did, what may come of it, and what did.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use forebay_tests::Forebay;
use forebay_tests::process::start;
use rand::SeedableRng;
use rand::rngs::StdRng;
use rustix::fs::{
    AtFlags, CWD, FallocateFlags, RenameFlags, StatxFlags, copy_file_range, fallocate, renameat_with, statx,
};

use super::operation::{HELD, Operation, operation};
use super::state::{DIRECTORIES, Found, NAMES, Pairs, Seen, State, differing, laid_over, turned};

/// Contents that are kept to be told of.
const LATELY: usize = 100;

/// One directory and all that it may be found to hold after a crash.
pub(crate) struct Writer {
    pub(crate) folder: PathBuf,
    /// The home of the mount, for commands.
    pub(crate) home: PathBuf,
    rng: StdRng,
    /// The states since the last fsync that was acknowledged, oldest first: the tree commits in order, so that a crash
    /// leaves one of them, perhaps with objects that came after it. The steps of a call that was never answered are
    /// among them.
    history: Vec<State>,
    /// All contents that any file ever had, by hash, and when.
    pub(crate) contents: HashMap<blake3::Hash, String>,
    /// The last of them, oldest first.
    lately: VecDeque<(String, Arc<Vec<u8>>)>,
    /// Descriptors that are open for writing, of which file.
    held: Vec<(usize, File)>,
    /// What was done in this round.
    done: Vec<String>,
    /// What is to be told of with that, of before the round.
    noticed: Option<String>,
    /// How often something was written.
    written: usize,
    round: usize,
    files: usize,
}

impl Writer {
    pub(crate) fn new(folder: PathBuf, seed: u64) -> Self {
        let contents = HashMap::from([(blake3::hash(b""), "empty".to_owned())]);
        let (rng, history) = (StdRng::seed_from_u64(seed), vec![State::default()]);
        Self {
            folder,
            home: PathBuf::new(),
            rng,
            history,
            contents,
            lately: VecDeque::new(),
            held: Vec::new(),
            done: Vec::new(),
            noticed: None,
            written: 0,
            round: 0,
            files: 0,
        }
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
        let bytes = Arc::new(bytes);
        self.lately.push_back((when.clone(), bytes.clone()));
        if self.lately.len() > LATELY {
            self.lately.pop_front();
        }
        self.contents.entry(blake3::hash(&bytes)).or_insert(when);
        let before = state.files.insert(file, bytes);
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
    pub(crate) fn work(&mut self, synced: &AtomicUsize, killed: &AtomicBool) {
        self.done = Vec::from_iter(self.noticed.take());
        loop {
            let operation = operation(&mut self.rng);
            if !self.note(&operation) {
                continue;
            }
            self.done.push(format!("{operation:?}"));
            match self.perform(&operation) {
                Ok(()) if operation.is_synced() => {
                    synced.fetch_add(1, Ordering::Relaxed);
                    self.settle(self.history.len() - 1);
                }
                Ok(()) => {}
                Err(error) => {
                    // The daemon died under the call, or before it.
                    let died = [libc::ENOTCONN, libc::ECONNABORTED, libc::EIO, libc::EINTR, libc::ENOENT];
                    let is_known = error.raw_os_error().is_none_or(|code| died.contains(&code));
                    assert!(is_known, "{operation:?}: {error}");
                    assert!(killed.load(Ordering::SeqCst), "the mount lives, and {operation:?}: {error}");
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
                self.step_to(file, bytes.to_vec());
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
            Operation::Append(name, ref bytes) => {
                let file = self.made(name);
                self.step_to(file, [&self.state().content(file), &bytes[..]].concat());
            }
            Operation::Map(name, (at, ref bytes)) => {
                let Some(file) = file(name) else { return false };
                let content = self.state().content(file);
                let Some(room) = content.len().checked_sub(at).filter(|room| *room > 0) else { return false };
                self.step_to(file, laid_over(content, at, &bytes[..bytes.len().min(room)]));
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
                // Who writes nothing commits nothing of what others write.
                if !bytes.is_empty() {
                    self.step_to(file, laid_over(self.state().content(file), at, &bytes));
                }
            }
            Operation::Clone(from, to) => match (file(from), file(to)) {
                (Some(source), None) => {
                    self.step_committed(source);
                    let bytes = self.state().content(source);
                    self.note_clone(to, bytes);
                }
                _ => return false,
            },
            Operation::Sync(name) => match file(name) {
                Some(file) => self.step_committed(file),
                None => return false,
            },
            _ => unreachable!("{operation:?} is of another kind"),
        }
        true
    }

    /// A whole file appears.
    fn note_clone(&mut self, name: &'static str, bytes: Vec<u8>) {
        let mut state = self.state().clone();
        self.files += 1;
        state.names.insert(name, self.files);
        state.files.insert(self.files, Arc::new(bytes));
        self.history.push(state);
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
                self.step_to(file, bytes.to_vec());
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
            Operation::Replace(name, bytes) => fs::write(path(name), &**bytes),
            Operation::Write(name, offset, bytes) => {
                let file = OpenOptions::new().write(true).create(true).truncate(false).open(path(name))?;
                file.write_all_at(bytes, *offset as u64)
            }
            Operation::Truncate(name, size) => {
                OpenOptions::new().write(true).open(path(name))?.set_len(*size as u64)
            }
            Operation::Append(name, bytes) => {
                OpenOptions::new().append(true).create(true).open(path(name))?.write_all(bytes)
            }
            Operation::Map(name, (at, bytes)) => store(&path(name), *at, bytes),
            Operation::Clone(from, to) => {
                let words = ["clone".into(), path(from).into_os_string(), path(to).into_os_string()];
                let outcome = Forebay::new(&self.home, words).run();
                match outcome.code {
                    Some(0) => Ok(()),
                    _ => Err(io::Error::other(outcome.to_string())),
                }
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
                    let done = || self.done.join("\n");
                    assert!(copied > 0, "{}, after\n{}", ends_early(&path(from), &source, left), done());
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
    pub(crate) fn make_directories(&self) {
        for directory in DIRECTORIES {
            fs::create_dir_all(self.folder.join(directory)).expect("a directory");
        }
    }

    /// Holds what is there now to what may be there, and goes on from it.
    #[track_caller]
    pub(crate) fn check(&mut self, round: usize) {
        self.round = round + 1;
        assert!(self.folder.is_dir(), "{} was synced", self.folder.display());
        self.make_directories();
        let mut seen = self.look();
        if let Some(inode) = differing(&seen) {
            // What was put and not committed by who was killed may come to light while it is looked at, and stays then.
            self.noticed = Some(format!("inode {inode} was read twice before, and differed"));
            seen = self.look();
        }
        let left = self.history.iter().rev().find_map(|state| state.left_as(&seen));
        match left.or_else(|| (0..self.history.len()).rev().find_map(|at| self.overtaken(at, &seen))) {
            Some(state) => self.history = vec![state],
            None => panic!("round {round}: {}", self.story(&seen)),
        }
    }

    /// Reads everything, each file under each of its names.
    #[track_caller]
    fn look(&self) -> Seen {
        let mut seen = Seen::new();
        for directory in [""].into_iter().chain(DIRECTORIES) {
            for entry in fs::read_dir(self.folder.join(directory)).expect("a directory") {
                let path = entry.expect("an entry").path();
                let name =
                    path.strip_prefix(&self.folder).ok().and_then(Path::to_str).expect("a name of ours");
                if !DIRECTORIES.contains(&name) {
                    let said = |error| panic!("{}: {error}", path.display());
                    let (inode, bytes) = fs::metadata(&path)
                        .and_then(|file| Ok((file.ino(), Arc::new(fs::read(&path)?))))
                        .unwrap_or_else(said);
                    seen.insert(name.to_owned(), Found { inode, bytes });
                }
            }
        }
        seen
    }

    /// The state at `at` with files that a later close had brought into the bucket before the tree was durable: such an
    /// object is found, and the changes of names before it are not. `None` when `seen` is not that.
    fn overtaken(&mut self, at: usize, seen: &Seen) -> Option<State> {
        let (state, later) = (&self.history[at], &self.history[at + 1..]);
        let came = |name: &str, bytes: &[u8]| {
            later.iter().any(|state| state.names.get(name).is_some_and(|file| state.may_hold(*file, bytes)))
        };
        if !state.names.keys().all(|name| seen.contains_key(*name)) {
            return None;
        }
        let (mut pairs, mut numbers, mut found) = (Pairs::default(), BTreeMap::new(), State::default());
        for (name, Found { inode, bytes }) in seen {
            let file = state.names.get(name.as_str()).filter(|file| state.may_hold(**file, bytes));
            // Else the name is another file's by now.
            let is_it = file.is_some_and(|file| pairs.fits(*file, *inode));
            let name = NAMES.iter().find(|known| *known == name).filter(|_| is_it || came(name, bytes))?;
            let number = *numbers.entry(*inode).or_insert_with(|| {
                self.files += 1;
                self.files
            });
            found.names.insert(*name, number);
            found.files.insert(number, bytes.clone());
        }
        Some(found)
    }

    /// In words, what of `bytes` is as in contents that files have had lately.
    fn alike(&self, bytes: &[u8]) -> Vec<String> {
        let alike = |pairs: &mut dyn Iterator<Item = (&u8, &u8)>| {
            pairs.take_while(|(one, other)| one == other).count()
        };
        let likeness = |(when, content): &(String, Arc<Vec<u8>>)| {
            let first = alike(&mut content.iter().zip(bytes));
            let last = alike(&mut content.iter().rev().zip(bytes.iter().rev()));
            let length = content.len();
            (first.max(last) > 64).then(|| {
                format!("{length} bytes ({when}): the first {first} and the last {last} are the same")
            })
        };
        self.lately.iter().filter_map(likeness).collect()
    }

    /// The same, and what was done in the round, if there is such a content.
    pub(crate) fn near(&self, bytes: &[u8]) -> Vec<String> {
        let alike = self.alike(bytes);
        if alike.is_empty() { alike } else { [alike, self.done.clone()].concat() }
    }

    /// A directory in a state that it never had, in words.
    fn story(&self, seen: &Seen) -> String {
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
        let origin =
            |(name, Found { inode, bytes }): (&String, &Found)| match self.contents.get(&blake3::hash(bytes))
            {
                Some(when) => format!("{name}, inode {inode}: {when}"),
                None => {
                    format!("{name}, inode {inode}: nobody wrote that, but\n{}", self.alike(bytes).join("\n"))
                }
            };
        let origins: Vec<_> = seen.iter().map(origin).collect();
        let seen = seen.iter().map(|(name, found)| (name.as_str(), &found.bytes[..])).collect();
        let (folder, seen) = (self.folder.display(), short(&seen));
        let (states, origins, done) = (states.join("\n"), origins.join("\n"), self.done.join("\n"));
        format!("{folder} holds\n{seen}\nnone of\n{states}\n{origins}\nafter\n{done}")
    }
}

/// What is known of a file of which copy_file_range found too little: what its kernel takes it for, what the mount says of
/// it, and what is read of it.
fn ends_early(path: &Path, open: &File, left: usize) -> String {
    let size = |flags| {
        let found = statx(open, c"", flags | AtFlags::EMPTY_PATH, StatxFlags::SIZE | StatxFlags::INO);
        found.map(|found| (found.stx_ino, found.stx_size))
    };
    let kept = size(AtFlags::STATX_DONT_SYNC);
    let (asked, read) = (size(AtFlags::STATX_FORCE_SYNC), fs::read(path).map(|bytes| bytes.len()));
    let named = fs::metadata(path).map(|named| (named.ino(), named.len()));
    format!(
        "{} ends {left} bytes too early. Inode and size: as the kernel had it {kept:?}, as it was told then {asked:?}; of \
         the name {named:?}; read {read:?} bytes",
        path.display()
    )
}

/// Stores `bytes`, as many as the file has room for, into a mapping of it, and waits for msync. A process of its own does:
/// one whose mapping is of a mount that died is killed for it.
fn store(path: &Path, at: usize, bytes: &[u8]) -> io::Result<()> {
    const PROGRAM: &str = "import mmap, sys\n\
         with open(sys.argv[1], 'r+b') as file, mmap.mmap(file.fileno(), 0) as memory:\n\
         \x20   at, data = int(sys.argv[2]), sys.stdin.buffer.read()[:len(memory) - int(sys.argv[2])]\n\
         \x20   memory[at:at + len(data)] = data\n\
         \x20   memory.flush()\n";
    let mut command = Command::new("python3");
    command.args(["-c", PROGRAM]).arg(path).arg(at.to_string());
    let mut child = start(command.stdin(Stdio::piped()).stderr(Stdio::null()))?;
    // It may be gone before it has read all.
    let _ = child.stdin.take().map(|mut stdin| stdin.write_all(bytes));
    match child.wait()?.success() {
        true => Ok(()),
        false => Err(io::Error::from_raw_os_error(libc::EIO)),
    }
}
