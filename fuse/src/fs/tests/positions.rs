//! A directory that changes by chance while it is read and sought in, against a plain model of it.

use std::collections::BTreeMap;
use std::ops::Bound;

use forebay_core::FileKind;

use super::*;
use crate::fs::listing::{BLOCK_NAMES, Cursor};

/// One open directory, and what is in it.
struct Walk {
    fs: FileSystem,
    ino: InodeId,
    handle: Handle,
    rng: Rng,
    /// Since when each name is there.
    names: BTreeMap<Vec<u8>, u64>,
    /// The name that each number was first handed out with, and when.
    positions: BTreeMap<u64, (Vec<u8>, u64)>,
    now: u64,
}

impl Walk {
    async fn new(seed: u64, cursor: Cursor) -> Self {
        let fs = writable().await;
        let ino = fs.make_directory(CALLER, ROOT, b"d", 0o755).await.expect("mkdir").ino;
        let handle = fs.directories.insert(Arc::new(tokio::sync::Mutex::new(cursor))).expect("opendir");
        let (names, positions) = (BTreeMap::new(), BTreeMap::from([(2, (Vec::new(), 0))]));
        Self { fs, ino, handle, rng: Rng::seeded(seed), names, positions, now: 0 }
    }

    fn below(&self, bound: usize) -> usize {
        self.rng.below(bound as u64) as usize
    }

    fn some_name(&self) -> Option<Vec<u8>> {
        self.names.keys().nth(self.below(self.names.len())).cloned()
    }

    /// Any bytes that a name may have, in any number that it may have, alike or not to others.
    fn new_name(&self) -> Vec<u8> {
        let mut name = match self.below(4) {
            0 => Vec::new(),
            1 => vec![b'a' + self.below(3) as u8; 250],
            2 => format!("{:06}", self.below(100_000)).into(),
            _ => self.some_name().unwrap_or_default(),
        };
        let mut more = vec![0; 1 + self.below(255)];
        self.rng.fill(&mut more);
        name.extend(more.into_iter().map(|byte| if matches!(byte, 0 | b'/' | b'.') { b'x' } else { byte }));
        name.truncate(255);
        name
    }

    async fn change(&mut self, times: usize, growth: f64) {
        self.now += 1;
        for _ in 0..times {
            let name = match self.some_name() {
                Some(name) if !self.rng.chance(growth) => name,
                _ => self.new_name(),
            };
            // What is removed may come back under its name later, as something that was not there all the time.
            if self.names.remove(&name).is_some() {
                self.fs.unlink(self.ino, &name).await.expect("unlink");
            } else {
                self.fs.make_node(CALLER, self.ino, &name, FileKind::Fifo, 0o644, 0).await.expect("mknod");
                self.names.insert(name, self.now);
            }
        }
    }

    /// Reads at most `room` entries after a position; returns the last one's number. Positions that the cursor does not
    /// know anymore lead somewhere.
    async fn read(&mut self, offset: u64, room: usize) -> u64 {
        let exact =
            offset == 2 || self.fs.directories.get(self.handle).expect("open").lock().await.knows(offset);
        let mut found = Vec::new();
        let take = |number, entry: &crate::fs::Listed| {
            let fits = found.len() < room;
            if fits {
                found.push((number, entry.name().to_vec()));
            }
            fits
        };
        self.fs.read_directory(self.ino, self.handle, offset, false, take).await.expect("readdir");
        assert!(found.is_sorted_by(|(_, one), (_, other)| one < other), "in order, none twice");
        assert!(found.iter().all(|(_, name)| self.names.contains_key(name)), "all of them exist");
        if exact {
            self.check(offset, &found, found.len() < room);
        }
        for (number, name) in &found {
            let known = self.positions.entry(*number).or_insert_with(|| (name.clone(), self.now));
            assert_eq!(known.0, *name, "number {number}");
        }
        found.last().map_or(offset, |(number, _)| *number)
    }

    /// What was there all the time since the position was handed out came if it lies after it, and else did not.
    fn check(&self, offset: u64, found: &[(u64, Vec<u8>)], to_the_end: bool) {
        let (after, when) = &self.positions[&offset];
        let names: Vec<&Vec<u8>> = found.iter().map(|(_, name)| name).collect();
        let last = names.last().copied().filter(|_| !to_the_end);
        let later = self.names.range::<Vec<u8>, _>((Bound::Excluded(after), Bound::Unbounded));
        let expected = later.map(|(name, _)| name).take_while(|name| last.is_none_or(|last| *name <= last));
        let stay = |name: &Vec<u8>| self.names.get(name).is_some_and(|since| since <= when);
        if offset == 2 || stay(after) {
            assert_eq!(names, expected.collect::<Vec<_>>(), "after {offset}");
        } else {
            // What came before a name of the position's block was handed out, and later than others of it, has no place
            // among them; where the names on one side of it went, nobody can tell on which side of the position it lies.
            let block = self.positions.range(offset.saturating_sub(BLOCK_NAMES as u64)..=offset);
            let begun = block.map(|(_, (_, when))| when).min().expect("the position's own");
            let stay = |name: &Vec<u8>| self.names.get(name).is_some_and(|since| since <= begun);
            let stayed: Vec<_> = names.into_iter().filter(|name| stay(name)).collect();
            let expected: Vec<_> = expected.filter(|name| stay(name)).collect();
            assert_eq!(stayed, expected, "after {offset}");
        }
    }
}

/// Changes and reads in turn: on from where it was, from any earlier position, from the start. Returns how many of the
/// numbers handed out the cursor knows no more.
async fn check_seed(seed: u64, cursor: Cursor) -> usize {
    let mut walk = Walk::new(seed, cursor).await;
    walk.change(600, 1.0).await;
    let mut at = 2;
    for _ in 0..60 {
        let at_most = 1 + walk.below(300);
        at = match walk.below(10) {
            0..4 => at,
            4..9 => *walk.positions.keys().nth(walk.below(walk.positions.len())).expect("one"),
            _ => 2,
        };
        at = walk.read(at, at_most).await;
        let times = walk.below(80);
        walk.change(times, 0.5).await;
    }
    let directory = walk.fs.directories.get(walk.handle).expect("open");
    let cursor = directory.lock().await;
    walk.positions.keys().filter(|number| **number > 2 && !cursor.knows(**number)).count()
}

fn seeds(base: u64) -> Vec<u64> {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    match number("FOREBAY_TEST_SEED") {
        Some(seed) => vec![seed],
        None => (0..base * number("FOREBAY_TEST_SCALE").unwrap_or(1)).map(|_| Rng::system().u64()).collect(),
    }
}

/// Promise S31: A position in a directory (telldir, or where a listing goes on) leads to the same place for as long as
/// the directory is open, whatever came and went meanwhile; what was there all the time is listed exactly once.
#[tokio::test]
async fn positions_lead_to_the_same_place_whatever_comes_and_goes() {
    for seed in seeds(5) {
        println!("repeat with FOREBAY_TEST_SEED={seed}");
        assert_eq!(check_seed(seed, Cursor::default()).await, 0);
    }
}

#[tokio::test]
async fn positions_that_are_known_are_exact_when_others_were_thinned_out() {
    for seed in seeds(3) {
        println!("repeat with FOREBAY_TEST_SEED={seed}");
        assert!(check_seed(seed, Cursor::with_limit(32 << 10)).await > 0);
    }
}
