//! What closures know besides the records: settings, time, who has what open, and what changed while a listing
//! was on its way.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use forebay_core::{InodeId, ObjectKey, Timestamp, Version};
use forebay_io::clock::Clock;
use forebay_io::object::Skipped;
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::claimed::Claimed;
use super::clones::Clones;
use super::counted::Quotas;
use super::layouts::Layouts;
use super::path::Spelling;
use super::segments::Pins;
use super::sessions::{Guests, Holds};
use super::{OutsideChanges, TreeSettings};
use crate::locks::Locks;
use crate::schema::Keys;

/// One per tree; closures hold it by `Arc`.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) keys: Keys,
    pub(crate) settings: TreeSettings,
    pub(crate) session: u64,
    pub(crate) clock: Clock,
    /// Which paths can be keys of the bucket.
    pub(crate) spelling: Spelling,
    /// How often each inode is open in this session.
    pub(crate) openers: Mutex<HashMap<InodeId, u32>>,
    /// Those among them that had no content, and were handed out so.
    pub(crate) handed_out_blank: Mutex<HashSet<InodeId>>,
    /// Other mounts that write to this tree.
    pub(crate) guests: Guests,
    /// Who is writing to which file's own path, where several mounts may.
    pub(crate) holds: Holds,
    /// Advisory locks of programs, on all mounts.
    pub(crate) locks: Locks,
    /// Inode numbers and generations below are given to nobody any more: the server before may have told its guests of some that it
    /// lost.
    pub(crate) first_number: AtomicU64,
    pub(crate) touched: Touched,
    pub(crate) markers: Markers,
    pub(crate) unshown: Unshown,
    pub(crate) quotas: Quotas,
    pub(crate) claimed: Claimed,
    pub(crate) clones: Clones,
    pub(crate) layouts: Layouts,
    /// Contents that are being written beside their paths.
    pub(crate) aside: Aside,
    /// Segments that are being written.
    pub(crate) segments: Arc<Pins>,
    /// Counts directory renames, so that the mover can tell that none came while it walked.
    pub(crate) subtree_moves: AtomicU64,
    /// How often bytes of files were brought elsewhere, or may have been, which gives these no new generation.
    pub(crate) relocations: AtomicU64,
    /// How often prefixes were let go of that may not be free on disk yet: after a power cut what is put there would be listed
    /// by the directories that had them, and taken for new contents of their files.
    pub(crate) prefixes_freed: AtomicU64,
    pub(crate) names_left: NamesLeft,
    /// Wakes the mover.
    pub(crate) work: Notify,
    /// Who hears of what listings change.
    pub(crate) outside: OutsideChanges,
}

impl Shared {
    pub(crate) fn new(
        keys: Keys,
        settings: TreeSettings,
        session: u64,
        clock: Clock,
        spelling: Spelling,
    ) -> Self {
        Self {
            keys,
            settings,
            session,
            clock,
            spelling,
            openers: Mutex::default(),
            handed_out_blank: Mutex::default(),
            guests: Guests::default(),
            holds: Holds::default(),
            locks: Locks::default(),
            first_number: AtomicU64::new(0),
            touched: Touched::default(),
            markers: Markers::default(),
            unshown: Unshown::default(),
            quotas: Quotas::default(),
            claimed: Claimed::default(),
            clones: Clones::default(),
            layouts: Layouts::default(),
            aside: Aside::default(),
            segments: Arc::default(),
            subtree_moves: AtomicU64::new(0),
            relocations: AtomicU64::new(0),
            prefixes_freed: AtomicU64::new(0),
            names_left: NamesLeft::default(),
            work: Notify::new(),
            outside: OutsideChanges::of(session),
        }
    }

    /// Whether what a session wrote and did not commit may still be committed.
    pub(crate) fn is_living(&self, session: u64) -> bool {
        session == self.session || self.guests.has(session)
    }

    /// Takes back one opener. Returns whether it was the last.
    pub(crate) fn forget_opener(&self, ino: InodeId) -> bool {
        let mut openers = self.openers.lock();
        match openers.get_mut(&ino) {
            Some(count) if *count > 1 => {
                *count -= 1;
                false
            }
            Some(_) => {
                self.handed_out_blank.lock().remove(&ino);
                self.layouts.forget(ino);
                openers.remove(&ino).is_some()
            }
            None => false,
        }
    }

    pub(crate) fn openers(&self, ino: InodeId) -> u32 {
        self.openers.lock().get(&ino).copied().unwrap_or(0)
    }

    pub(crate) fn now(&self) -> Timestamp {
        self.clock.wall()
    }

    pub(crate) fn now_ms(&self) -> u64 {
        let now = self.now();
        (now.seconds.max(0) as u64).saturating_mul(1000) + u64::from(now.nanos / 1_000_000)
    }
}

/// How often a name was left while no claim keeps others from its key, and how much of that is on disk. After a power cut whoever left
/// it has it again, and what another file has put there meanwhile would be taken for an outsider's, who replaced that one.
#[derive(Debug, Default)]
pub(crate) struct NamesLeft {
    all: AtomicU64,
    durable: AtomicU64,
}

impl NamesLeft {
    pub(crate) fn note(&self) {
        self.all.fetch_add(1, Ordering::SeqCst);
    }

    /// How many there were so far, if some may not be on disk.
    pub(crate) fn pending(&self) -> Option<u64> {
        let all = self.all.load(Ordering::SeqCst);
        (all > self.durable.load(Ordering::SeqCst)).then_some(all)
    }

    /// Those up to `all` are on disk.
    pub(crate) fn synced(&self, all: u64) {
        self.durable.fetch_max(all, Ordering::SeqCst);
    }
}

/// What was placed beside its path because that was not free. In memory only: who writes it goes with this process.
#[derive(Debug, Default)]
pub(crate) struct Aside {
    /// The owned blobs that were placed last.
    keys: Mutex<VecDeque<ObjectKey>>,
    /// The files at whose paths lies what others hold. The move that is queued for each makes room.
    crowded: Mutex<HashSet<InodeId>>,
}

/// Keys remembered. Of one that is forgotten the content stays beside its path until the file is written again.
const MOST_ASIDE: usize = 1024;

impl Aside {
    pub(crate) fn add(&self, key: &ObjectKey) {
        let mut keys = self.keys.lock();
        if !keys.contains(key) {
            if keys.len() == MOST_ASIDE {
                keys.pop_front();
            }
            keys.push_back(key.clone());
        }
    }

    pub(crate) fn has(&self, key: &ObjectKey) -> bool {
        self.keys.lock().contains(key)
    }

    pub(crate) fn want_room(&self, ino: InodeId) {
        self.crowded.lock().insert(ino);
    }

    pub(crate) fn wants_room(&self, ino: InodeId) -> bool {
        self.crowded.lock().contains(&ino)
    }

    /// Forgets a file whose queued move was looked at.
    pub(crate) fn end_crowd(&self, ino: InodeId) {
        self.crowded.lock().remove(&ino);
    }
}

/// The markers of directories (`dir/`) that listings showed, by their prefixes: they make a directory where nothing is below,
/// and go when that is removed or renamed. In memory only: whoever removes a directory has listed it.
#[derive(Debug, Default)]
pub(crate) struct Markers(Mutex<HashMap<String, Version>>);

/// Markers remembered. Where there are more, some are forgotten, and their directories come back.
const MOST_MARKERS: usize = 1 << 16;

impl Markers {
    /// Notes what a listing of `prefix`, with its slash, showed.
    pub(crate) fn note(&self, prefix: &str, marker: Option<Version>) {
        let mut known = self.0.lock();
        match marker {
            None => drop(known.remove(prefix)),
            Some(marker) => {
                if known.len() >= MOST_MARKERS
                    && let Some(other) = known.keys().next().cloned()
                {
                    known.remove(&other);
                }
                known.insert(prefix.to_owned(), marker);
            }
        }
    }

    pub(crate) fn of(&self, prefix: &str) -> Option<Version> {
        self.0.lock().get(prefix).cloned()
    }
}

/// What listings showed below directories by keys that no path spells: who removes such a directory would have it back with the next
/// listing. In memory only, as [`Markers`] are.
#[derive(Debug, Default)]
pub(crate) struct Unshown(Mutex<HashMap<InodeId, Skipped>>);

/// Directories of that kind that are remembered.
const MOST_UNSHOWN: usize = 1 << 16;

impl Unshown {
    /// Notes what a listing of `directory` left out. Returns whether that is to be told: as long as it is as many, it was.
    pub(crate) fn note(&self, directory: InodeId, skipped: Skipped) -> bool {
        let mut known = self.0.lock();
        if skipped.keys == 0 {
            known.remove(&directory);
            return false;
        }
        if known.len() >= MOST_UNSHOWN
            && let Some(other) = known.keys().next().copied()
        {
            known.remove(&other);
        }
        let keys = skipped.keys;
        known.insert(directory, skipped).is_none_or(|before| before.keys != keys)
    }

    /// The first key below a directory that no path spells, if there are any.
    pub(crate) fn below(&self, directory: InodeId) -> Option<String> {
        self.0.lock().get(&directory)?.first.clone()
    }
}

/// Names and keys that Forebay changed while a listing of their directory was under way. The listing says nothing
/// certain about them, so it is not believed there; the next one will be.
///
/// Both sides run in the committer's closures, hence one after another. Bounded by the listings in flight.
#[derive(Debug, Default)]
pub(crate) struct Touched {
    watches: Mutex<HashMap<InodeId, Watch>>,
    begun: AtomicU64,
}

#[derive(Debug, Default)]
struct Watch {
    /// Which one it is.
    number: u64,
    prefix: String,
    names: HashSet<Bytes>,
    keys: HashSet<String>,
}

impl Touched {
    /// Starts to take notes for a listing of `directory` from `prefix` (with its slash, or empty for the root).
    pub(crate) fn begin(&self, directory: InodeId, prefix: String) {
        let number = self.begun.fetch_add(1, Ordering::Relaxed);
        self.watches.lock().insert(directory, Watch { number, prefix, ..Watch::default() });
    }

    /// Which listing of `directory` is under way, and the prefix that it lists.
    pub(crate) fn under_way(&self, directory: InodeId) -> Option<(u64, String)> {
        self.watches.lock().get(&directory).map(|watch| (watch.number, watch.prefix.clone()))
    }

    /// Whether that is still this one: of what changed since it began, all is known.
    pub(crate) fn is_under_way(&self, directory: InodeId, number: u64) -> bool {
        self.watches.lock().get(&directory).is_some_and(|watch| watch.number == number)
    }

    /// Forgets the notes.
    pub(crate) fn end(&self, directory: InodeId) {
        self.watches.lock().remove(&directory);
    }

    /// Notes that the entry `name` of `directory` changed.
    pub(crate) fn name(&self, directory: InodeId, name: &[u8]) {
        if let Some(watch) = self.watches.lock().get_mut(&directory) {
            watch.names.insert(Bytes::copy_from_slice(name));
        }
    }

    /// Notes that what lies at `key`, or who holds it, changed: of a listing, the key itself or the one that leads there.
    pub(crate) fn key(&self, key: &str) {
        for watch in self.watches.lock().values_mut() {
            let Some(rest) = key.strip_prefix(watch.prefix.as_str()) else { continue };
            let listed = watch.prefix.len() + rest.find('/').unwrap_or(rest.len());
            if !watch.keys.contains(&key[..listed]) {
                watch.keys.insert(key[..listed].to_owned());
            }
        }
    }

    /// Whether the entry, the key or anything below it changed since the listing began.
    pub(crate) fn is(&self, directory: InodeId, name: &[u8], key: &str) -> bool {
        let watches = self.watches.lock();
        let watch = watches.get(&directory);
        watch
            .is_some_and(|watch| watch.names.contains(name) || watch.keys.contains(key.trim_end_matches('/')))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_listing_left_out_is_told_once_until_it_is_another_number() {
        let unshown = Unshown::default();
        let directory = InodeId(7);
        let note = |keys, first: &str| {
            let skipped = Skipped { keys, first: (keys > 0).then(|| first.to_owned()) };
            unshown.note(directory, skipped)
        };
        assert!(!note(0, "") && unshown.below(directory).is_none());
        assert!(note(2, "d//a") && !note(2, "d//a"));
        assert!(note(3, "d//0") && !note(3, "d//0"));
        assert_eq!(unshown.below(directory).as_deref(), Some("d//0"));
        assert_eq!(unshown.below(InodeId(8)), None);
        assert!(!note(0, "") && unshown.below(directory).is_none());
        assert!(note(3, "d//0"), "it came back");
    }
}
