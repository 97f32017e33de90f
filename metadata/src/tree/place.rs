//! Where the next whole content of a file goes.

use forebay_core::{Blob, InodeId, ObjectKey, Result};

use super::Placement;
use crate::mover::LONGEST_COPY;
use crate::records::{Change, Occupancy, Records};
use crate::schema::{Announced, Deletion, HolderState, Intent, Mark};

/// What a look at the records came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Step {
    /// The answer; it is recorded. `is_first` of a file that never had content.
    Placed { placement: Placement, is_first: bool },
    /// An earlier write may or may not have happened: that has to be found out first.
    Unsettled,
    /// The file's own key, or one in its way, holds an object that is queued for deletion; it has to go first.
    Doomed(ObjectKey),
    /// Other files hold bytes of the object that would be replaced: those have to be copied away first.
    Lent(Blob),
}

/// One attempt of [`super::Tree::place`]. `fresh` is used if the content goes to an owned blob, as it does when
/// `is_last` says that copies, doomed and lent objects are not waited for any more; else the object carries `token`, and
/// `seals` the content that the file has. There is nothing to copy away of an object that is `gone`. What was announced
/// `in_doubt` may still come to the same key, and stays known.
pub(super) fn place(
    change: &mut Change<'_, '_>,
    ino: InodeId,
    (fresh, token, seals): (&ObjectKey, &str, bool),
    (is_last, gone): (bool, Option<&Blob>),
    in_doubt: Option<&Intent>,
) -> Result<Step> {
    let inode = change.file(ino)?;
    let before = match change.intent(ino)? {
        // The copy that is under way, or may be, is of content that this one replaces.
        Some(intent) if intent.copies.is_some() && is_last => return place_aside(change, ino, fresh, true),
        Some(intent) if Some(&intent) == in_doubt => Some(intent),
        // What it says of the content tells that what comes there is older.
        Some(intent) if intent.announced().is_some() && is_last => {
            return place_aside(change, ino, fresh, true);
        }
        Some(_) => return Ok(Step::Unsettled),
        None => None,
    };
    let spelled = if inode.nlink > 0 { change.key_of(ino, &inode)? } else { None };
    let Some(key) = spelled else { return place_owned(change, fresh, false) };
    match change.in_the_way(&key)? {
        None => {}
        Some(file) => {
            let is_doomed = change.occupancy(ino, &file)? == Occupancy::Doomed;
            return match is_doomed && !is_last {
                true => Ok(Step::Doomed(ObjectKey::new(file))),
                false => place_aside(change, ino, fresh, is_doomed),
            };
        }
    }
    match change.occupancy(ino, &key)? {
        Occupancy::Free => {
            let replaced = |home: &&Blob| home.key.as_str() == key && Some(*home) != gone;
            if let Some(home) = inode.home.as_ref().filter(replaced)
                && change.is_lent(home)?
            {
                return match is_last || home.size > LONGEST_COPY {
                    true => {
                        change.shared.aside.want_room(ino);
                        place_aside(change, ino, fresh, true)
                    }
                    false => Ok(Step::Lent(home.clone())),
                };
            }
            let key = ObjectKey::new(key);
            let earlier = match before {
                // It would be forgotten, and come to where it is nobody's.
                Some(before) if before.key != key => return place_aside(change, ino, fresh, true),
                before => before.and_then(|before| before.mark).map(Mark::and_earlier).unwrap_or_default(),
            };
            let is_first = inode.is_blank();
            let replaces = inode.home.filter(|home| home.key == key).map(|home| home.version);
            let of = Some(Announced { generation: inode.generation, seals });
            let mark = Some(Mark { token: token.to_owned(), made: change.now, of, earlier });
            let intent = Intent { key: key.clone(), replaces: replaces.clone(), copies: None, mark };
            change.put_intent(ino, &intent)?;
            Ok(Step::Placed {
                placement: Placement::Own { key, replaces, token: token.to_owned() },
                is_first,
            })
        }
        Occupancy::Doomed if !is_last && !takes_long(change, &key)? => Ok(Step::Doomed(ObjectKey::new(key))),
        Occupancy::Doomed => place_aside(change, ino, fresh, true),
        Occupancy::Taken => place_aside(change, ino, fresh, false),
    }
}

/// Whether the object that is to go has to be copied away first, and is too large to be waited for.
fn takes_long(change: &Change<'_, '_>, key: &str) -> Result<bool> {
    let claim = change.claim(key)?.map(|claim| claim.state);
    let Some(HolderState::Doomed { due_ms }) = claim else { return Ok(false) };
    let Some(queued) = change.reads().get(&change.keys().deletion(due_ms, key))? else { return Ok(false) };
    match Deletion::decode(queued) {
        Ok(Deletion { blob, .. }) => Ok(blob.size > LONGEST_COPY && change.is_lent(&blob)?),
        // Nobody knows what is to go, and it does not.
        Err(_) => Ok(true),
    }
}

/// An owned blob for content that belongs to a path which is not free: it is moved there later. Also when it is committed,
/// since until then the mover finds only the old content, and nothing to do.
fn place_aside(
    change: &mut Change<'_, '_>,
    ino: InodeId,
    fresh: &ObjectKey,
    comes_free: bool,
) -> Result<Step> {
    change.shared.aside.add(fresh);
    change.queue_move(ino)?;
    place_owned(change, fresh, comes_free)
}

fn place_owned(change: &mut Change<'_, '_>, fresh: &ObjectKey, comes_free: bool) -> Result<Step> {
    change.note_uncommitted(fresh)?;
    let placement = Placement::Owned { key: fresh.clone(), comes_free };
    Ok(Step::Placed { placement, is_first: false })
}
