//! Who holds which object key.
//!
//! A key without a claim belongs to the file at that path, if there is one, and may be listed and written. A claim
//! says otherwise: the key holds bytes of a file elsewhere, is about to be written, is about to be deleted, or lies
//! under a directory that was renamed. No other file is placed at a claimed key and no listing is believed there.

use std::sync::atomic::Ordering;

use forebay_core::{Blob, FileKind, FileLayout, InodeId, ObjectKey, Result, Version};
use forebay_io::object::ObjectInfo;

use super::claimed::{Below, MOST_CLAIMED};
use super::path::Spelling;
use super::{Change, Records, prefix_with_slash, readable};
use crate::schema::{CLOCKS_APART, Claim, Deletion, HolderState, Inode, Intent, Move, Tag};

/// Whether a file may be written at a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Occupancy {
    /// It may.
    Free,
    /// Once the object there is deleted, which is queued.
    Doomed,
    /// Another file's bytes are there.
    Taken,
}

impl Change<'_, '_> {
    /// Whether the file `ino` may be written at `key`.
    pub(crate) fn occupancy(&self, ino: InodeId, key: &str) -> Result<Occupancy> {
        if self.lies_below_claim(key)? {
            return Ok(Occupancy::Taken);
        }
        Ok(match self.claim(key)?.map(|claim| claim.state) {
            None => Occupancy::Free,
            Some(HolderState::Held(holder) | HolderState::Intended(holder)) if holder == ino => {
                Occupancy::Free
            }
            Some(HolderState::Doomed { .. }) => Occupancy::Doomed,
            Some(_) => Occupancy::Taken,
        })
    }

    /// What keeps `key` from being written where no name is both an object and a directory, as in folders: the key of a
    /// file that the path leads through, the prefix of a directory at the path, or a key below it, which are still to be
    /// moved or deleted. A directory that was removed is forgotten before what files that are open or elsewhere have there.
    /// To be asked before anything is changed.
    pub(crate) fn in_the_way(&self, key: &str) -> Result<Option<String>> {
        for (slash, _) in key.match_indices('/') {
            if self.claim(&key[..slash])?.is_some() {
                return Ok(Some(key[..slash].to_owned()));
            }
        }
        let below = prefix_with_slash(key);
        match (self.claim(&below)?, self.shared.spelling) {
            (None, Spelling::Files) => self.claimed_below(below),
            (claim, _) => Ok(claim.map(|_| below)),
        }
    }

    /// A claimed key below a prefix; the prefix itself where there may be one.
    fn claimed_below(&self, prefix: String) -> Result<Option<String>> {
        let claimed = &self.shared.claimed;
        if claimed.asks() {
            let (start, end) = self.keys().family(Tag::Claim);
            let claims = self.reads().scan(&start, &end, MOST_CLAIMED + 1)?;
            let is_all = claims.len() <= MOST_CLAIMED;
            // Of one that cannot be read nobody knows where it lies; the store refuses what comes above it.
            let claims = claims.into_iter().filter_map(|(_, value)| readable(Claim::decode(value)));
            claimed.learn(is_all.then(|| claims.map(|claim| claim.key.as_str().to_owned()).collect()));
        }
        loop {
            let key = match claimed.below(&prefix) {
                Below::Nothing => return Ok(None),
                Below::Unknown => return Ok(Some(prefix)),
                Below::Key(key) => key,
            };
            if self.claim(&key)?.is_some() {
                return Ok(Some(key));
            }
            claimed.forget(&key);
        }
    }

    /// Whether `key` lies under a directory that was renamed. It may be a prefix itself, with its slash.
    pub(crate) fn lies_below_claim(&self, key: &str) -> Result<bool> {
        for (slash, _) in key.match_indices('/') {
            let claim = self.claim(&key[..=slash])?.map(|claim| claim.state);
            if matches!(claim, Some(HolderState::Subtree(_))) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Makes the claim on a file's plain object fit where the file is now. To be called after its first name, its
    /// home or its link count changed.
    pub(crate) fn settle_home(&mut self, ino: InodeId, inode: &Inode) -> Result<()> {
        let Some(home) = &inode.home else { return Ok(()) };
        let key = home.key.as_str();
        let claim = self.claim(key)?.map(|claim| claim.state);
        let is_home = inode.nlink > 0 && self.key_of(ino, inode)?.as_deref() == Some(key);
        // Below the claim of a renamed directory that one still lists the key: only a claim keeps it from doing so.
        if is_home && !self.lies_below_claim(key)? {
            return match claim {
                Some(HolderState::Held(holder)) if holder == ino => self.delete_claim(key),
                _ => Ok(()),
            };
        }
        if claim != Some(HolderState::Intended(ino)) {
            self.put_claim(&Claim { key: home.key.clone(), state: HolderState::Held(ino) })?;
        }
        if inode.nlink > 0 { self.queue_move(ino) } else { Ok(()) }
    }

    /// Whether a file whose bytes all lie elsewhere was written, or came to its path, after the object that was found there:
    /// what is there is older content of the path, which a mount that died had not recorded, and not the file's. The times of
    /// a folder's files are set by programs as those of the tree's are, and compared with these alone.
    pub(crate) fn outlives(&self, ino: InodeId, inode: &Inode, found: &ObjectInfo) -> Result<bool> {
        let layout = self.layout(ino, inode)?;
        let is_elsewhere =
            layout.blobs().next().is_some() && layout.blobs().all(|blob| blob.key != found.key);
        let since = match self.shared.spelling {
            Spelling::Files => inode.mtime.seconds,
            _ => inode.since(),
        };
        Ok(is_elsewhere && found.modified.seconds + CLOCKS_APART < since)
    }

    /// Whether a file never had content, and an object at `key` is its first: whether that was written through a mount that
    /// died before it had recorded it, or by an outsider, cannot be known.
    pub(crate) fn awaits_content(&self, ino: InodeId, inode: &Inode, key: &str) -> Result<bool> {
        Ok(inode.is_blank()
            && inode.nlink > 0
            && self.key_of(ino, inode)?.as_deref() == Some(key)
            && self.intent(ino)?.is_none())
    }

    /// The key at which such a file finds its first content, if nobody else speaks for that.
    pub(crate) fn awaited_at(&self, ino: InodeId) -> Result<Option<ObjectKey>> {
        let Some(inode) = self.find(ino)?.filter(|inode| inode.kind == FileKind::File) else {
            return Ok(None);
        };
        let Some(key) = self.key_of(ino, &inode)? else { return Ok(None) };
        let claim = self.claim(&key)?.map(|claim| claim.state);
        let is_own =
            matches!(claim, None | Some(HolderState::Doomed { .. })) && !self.lies_below_claim(&key)?;
        Ok((is_own && self.awaits_content(ino, &inode, &key)?).then(|| ObjectKey::new(key)))
    }

    /// Whether such a file awaits just this object, which is not the one that is to be deleted there.
    pub(crate) fn awaits(&self, ino: InodeId, found: &ObjectInfo) -> Result<bool> {
        if self.awaited_at(ino)?.is_none_or(|key| key != found.key) {
            return Ok(false);
        }
        match self.claim(found.key.as_str())?.map(|claim| claim.state) {
            Some(HolderState::Doomed { due_ms }) => self.is_successor(due_ms, found),
            _ => Ok(true),
        }
    }

    /// Whether an object came after the one that is to be deleted at its key: by an outsider, or as the first content of a
    /// file whose mount died before it had noted that the key is free. A damaged record knows none.
    pub(crate) fn is_successor(&self, due_ms: u64, found: &ObjectInfo) -> Result<bool> {
        let queued = self.keys().deletion(due_ms, found.key.as_str());
        let doomed = self.reads().get(&queued)?.map(Deletion::decode).and_then(readable);
        Ok(doomed.is_some_and(|doomed| doomed.blob.version != found.version))
    }

    /// Makes an object the first content of such a file, which stays what it is otherwise. As nobody knows who wrote it, it
    /// gets no rights of the owner's.
    pub(crate) fn begin_with(&mut self, ino: InodeId, mut inode: Inode, found: &ObjectInfo) -> Result<()> {
        let layout = FileLayout::of_blob(found.blob());
        self.replace_layout((ino, &mut inode), &layout, Some(found.blob()))?;
        inode.drop_set_id();
        self.delete(self.keys().xattr(ino, b"security.capability"))?;
        inode.generation = self.next_generation(&inode);
        (inode.mtime, inode.since) = (found.modified, None);
        inode.ctime = self.now;
        self.put_inode(ino, &inode)?;
        self.settle_home(ino, &inode)
    }

    /// Takes an older object at a file's own path for the one that the file's next whole content replaces; where the
    /// file has a plain object already, it goes.
    pub(crate) fn stand(&mut self, ino: InodeId, mut inode: Inode, found: Blob) -> Result<()> {
        if inode.home.as_ref().is_some_and(|home| home.key != found.key) {
            self.doom_plain(&found)?;
            return self.settle_home(ino, &inode);
        }
        inode.home = Some(found);
        self.put_inode(ino, &inode)?;
        self.settle_home(ino, &inode)
    }

    /// The same after an attempt came to nothing: where all is noted as it should be, to note it again would wake the mover
    /// for it at once.
    pub(crate) fn resettle_home(&mut self, ino: InodeId, inode: &Inode) -> Result<()> {
        let claim = inode.home.as_ref().map(|home| self.claim(home.key.as_str())).transpose()?.flatten();
        let is_held = claim.is_some_and(|claim| claim.state == HolderState::Held(ino));
        if is_held && self.is_moving(ino)? { Ok(()) } else { self.settle_home(ino, inode) }
    }

    /// Whether the mover was asked to bring the bytes of a file to its key, or to walk a directory.
    pub(crate) fn is_moving(&self, ino: InodeId) -> Result<bool> {
        Ok(self.reads().get(&self.keys().movement(ino))?.is_some())
    }

    /// Asks the mover to bring a file's bytes to the key that its path spells.
    pub(crate) fn queue_move(&mut self, ino: InodeId) -> Result<()> {
        self.shared.work.notify_one();
        self.put(self.keys().movement(ino), Move::File.encode())
    }

    /// Claims the prefixes that a directory was known by, before it is renamed: all bytes below stay where they
    /// are until the mover has claimed them one by one.
    pub(crate) fn claim_subtree(&mut self, ino: InodeId, directory: &Inode) -> Result<()> {
        let imported_from = self.import_state(ino)?.prefix;
        let spelled = self.key_of(ino, directory)?;
        let mut prefixes = match self.movement(ino)? {
            Some(Move::Subtree { prefixes }) => prefixes,
            _ => Vec::new(),
        };
        if imported_from.is_none() && spelled.is_none() {
            return Ok(());
        }
        for prefix in imported_from.into_iter().chain(spelled).map(|prefix| prefix_with_slash(&prefix)) {
            // Below another claim it is safe already: claims go only after all queued directories are walked.
            if prefixes.contains(&prefix) || self.lies_below_claim(&prefix)? {
                continue;
            }
            let key = ObjectKey::new(prefix.clone());
            self.put_claim(&Claim { key, state: HolderState::Subtree(ino) })?;
            prefixes.push(prefix);
        }
        self.shared.subtree_moves.fetch_add(1, Ordering::SeqCst);
        self.shared.work.notify_one();
        self.put(self.keys().movement(ino), Move::Subtree { prefixes }.encode())
    }

    /// Gives a directory the prefix that its path spells to be listed from, if that belongs to nothing else. Returns
    /// the prefix.
    pub(crate) fn attach(&mut self, ino: InodeId) -> Result<Option<String>> {
        let directory = self.directory(ino)?;
        let mut state = self.import_state(ino)?;
        let spelled = self.key_of(ino, &directory)?;
        state.prefix = match spelled {
            Some(prefix) if !self.lies_below_claim(&prefix_with_slash(&prefix))? => Some(prefix),
            _ => None,
        };
        self.put_import_state(ino, &state)?;
        Ok(state.prefix)
    }

    /// Queues a plain object for deletion and claims its key until it is gone.
    pub(crate) fn doom_plain(&mut self, blob: &Blob) -> Result<()> {
        let due_ms = self.shared.now_ms();
        self.put_claim(&Claim { key: blob.key.clone(), state: HolderState::Doomed { due_ms } })?;
        self.queue_deletion(due_ms, Deletion { blob: blob.clone(), session: None })
    }

    /// Keeps a removed directory from being listed again while objects below its prefix, or its marker, are still to be
    /// deleted.
    pub(crate) fn doom_prefix(&mut self, directory: InodeId) -> Result<()> {
        let prefix = self.import_state(directory)?.prefix.map(|prefix| prefix_with_slash(&prefix));
        let Some(prefix) = prefix.filter(|prefix| !prefix.is_empty()) else { return Ok(()) };
        let marker = self.shared.markers.of(&prefix).unwrap_or_else(|| Version::new(""));
        self.doom_prefix_with(prefix, marker)
    }

    /// The same of a prefix that a directory has left by a rename, where it has a marker.
    pub(crate) fn doom_marker(&mut self, prefix: &str) -> Result<()> {
        match self.shared.markers.of(prefix) {
            Some(marker) => self.doom_prefix_with(prefix.to_owned(), marker),
            None => Ok(()),
        }
    }

    fn doom_prefix_with(&mut self, prefix: String, marker: Version) -> Result<()> {
        if self.claim(&prefix)?.is_some() {
            return Ok(());
        }
        let due_ms = self.shared.now_ms();
        let key = ObjectKey::new(prefix);
        self.put_claim(&Claim { key: key.clone(), state: HolderState::Doomed { due_ms } })?;
        let blob = Blob { key, version: marker, size: 0 };
        self.queue_deletion(due_ms, Deletion { blob, session: None })
    }

    pub(crate) fn queue_deletion(&mut self, due_ms: u64, deletion: Deletion) -> Result<()> {
        self.shared.work.notify_one();
        let key = self.keys().deletion(due_ms, deletion.blob.key.as_str());
        self.put(key, deletion.encode())
    }

    /// Notes that `ino` is about to be written at `intent.key`.
    pub(crate) fn put_intent(&mut self, ino: InodeId, intent: &Intent) -> Result<()> {
        self.put_claim(&Claim { key: intent.key.clone(), state: HolderState::Intended(ino) })?;
        self.put(self.keys().intent(ino), intent.encode())
    }

    /// Ends an intent, whatever came of it. The caller settles the home afterwards.
    pub(crate) fn end_intent(&mut self, ino: InodeId, intent: &Intent) -> Result<()> {
        self.delete(self.keys().intent(ino))?;
        let key = intent.key.as_str();
        match self.claim(key)?.map(|claim| claim.state) {
            Some(HolderState::Intended(holder)) if holder == ino => self.delete_claim(key),
            _ => Ok(()),
        }
    }
}
