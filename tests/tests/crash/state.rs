//! What a directory may be found to hold.

use std::collections::BTreeMap;
use std::sync::Arc;

/// Few names, so that operations meet; the same in both directories, which take each other's place.
pub(crate) const NAMES: [&str; 8] = ["a", "b", "c c", "ü", "x/a", "x/ü", "y/a", "y/ü"];
/// The directories among them. They are there as long as nobody is in between of moving one.
pub(crate) const DIRECTORIES: [&str; 2] = ["x", "y"];

/// What is there, by name.
pub(crate) type Seen = BTreeMap<String, Found>;

/// A file that is there.
pub(crate) struct Found {
    /// The same for all names of one file.
    pub(crate) inode: u64,
    pub(crate) bytes: Arc<Vec<u8>>,
}

/// An inode that does not hold the same bytes under each of its names.
pub(crate) fn differing(seen: &Seen) -> Option<u64> {
    let mut known = BTreeMap::new();
    let mut files = seen.values();
    files.find(|file| **known.entry(file.inode).or_insert(&file.bytes) != file.bytes).map(|file| file.inode)
}

/// Which file is which inode. Two files may well hold the same bytes.
#[derive(Default)]
pub(crate) struct Pairs {
    inodes: BTreeMap<usize, u64>,
    files: BTreeMap<u64, usize>,
}

impl Pairs {
    /// Whether the file may be the inode, as it is from then on.
    pub(crate) fn fits(&mut self, file: usize, inode: u64) -> bool {
        let known = (self.inodes.get(&file), self.files.get(&inode));
        if known == (None, None) {
            self.inodes.insert(file, inode);
            self.files.insert(inode, file);
            return true;
        }
        known == (Some(&inode), Some(&file))
    }
}

/// A directory's files: for each name which file it is, for each file its bytes.
#[derive(Debug, Clone, Default)]
pub(crate) struct State {
    pub(crate) names: BTreeMap<&'static str, usize>,
    pub(crate) files: BTreeMap<usize, Arc<Vec<u8>>>,
    /// Of files that were written through a descriptor which is open still: what they held from the last fsync or close
    /// on, any of which they may be found to hold.
    pub(crate) earlier: BTreeMap<usize, Vec<Arc<Vec<u8>>>>,
}

impl State {
    /// What a reader sees.
    pub(crate) fn seen(&self) -> BTreeMap<&str, &[u8]> {
        self.names.iter().map(|(name, file)| (*name, &self.files[file][..])).collect()
    }

    pub(crate) fn content(&self, file: usize) -> Vec<u8> {
        self.files[&file].to_vec()
    }

    /// Whether a crash may leave these bytes in the file.
    pub(crate) fn may_hold(&self, file: usize, bytes: &[u8]) -> bool {
        let earlier = self.earlier.get(&file).into_iter().flatten();
        earlier.chain(self.files.get(&file)).any(|known| known[..] == *bytes)
    }

    /// This state as a crash left it, if `seen` is that: the same names of the same files, and for each file one content
    /// that it may have.
    pub(crate) fn left_as(&self, seen: &Seen) -> Option<Self> {
        let mut found = Self { names: self.names.clone(), ..Self::default() };
        let mut pairs = Pairs::default();
        for (name, file) in &self.names {
            let Found { inode, bytes } = seen.get(*name)?;
            if !pairs.fits(*file, *inode) || !self.may_hold(*file, bytes) {
                return None;
            }
            // Under each of its names it is the same.
            if found.files.entry(*file).or_insert_with(|| bytes.clone()) != bytes {
                return None;
            }
        }
        (seen.len() == self.names.len()).then_some(found)
    }
}

/// `bytes` written over `content`.
pub(crate) fn laid_over(mut content: Vec<u8>, offset: usize, bytes: &[u8]) -> Vec<u8> {
    let end = offset + bytes.len();
    content.resize(content.len().max(end), 0);
    content[offset..end].copy_from_slice(bytes);
    content
}

/// The same name in the other directory; a name in none stays.
pub(crate) fn turned(name: &'static str) -> &'static str {
    let Some((directory, rest)) = name.split_once('/') else { return name };
    let is_other =
        |known: &&str| known.split_once('/').is_some_and(|(at, name)| at != directory && name == rest);
    NAMES.into_iter().find(is_other).expect("both directories have the same names")
}
