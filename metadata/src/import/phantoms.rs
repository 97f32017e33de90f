//! Prefixes that are listed for the sake of claimed keys alone: below what was a directory, objects wait to be moved or
//! deleted. They are no directories; made of one, it would even take its name from a file.

use std::collections::HashSet;

use bytes::Bytes;
use forebay_core::{FileKind, InodeId, Result};
use forebay_io::object::{Bucket, Listing};
use futures::stream::{self, StreamExt, TryStreamExt};

use crate::commit::Committer;
use crate::records::{Look, Records, prefix_with_slash};
use crate::schema::{Claim, Dentry, Keys, Tag};

/// Claims that are looked through to tell which prefixes have any; where there are more, each may have.
const MOST_CLAIMS: usize = 4096;
/// Prefixes that are listed at once.
const AT_ONCE: usize = 16;
/// Keys whose claims are asked for together.
const STEP: usize = 256;

/// Where claims are looked up.
pub(super) struct Phantoms<'a> {
    pub(super) bucket: &'a Bucket,
    pub(super) committer: &'a Committer,
    pub(super) keys: Keys,
}

impl Phantoms<'_> {
    /// Takes such prefixes out of `listing`, that of `directory` at `prefix`. Only prefixes that are no directory yet and
    /// that have claims below are looked into: one listing each, up to the first key that nobody claims.
    pub(super) async fn drop(&self, directory: InodeId, prefix: &str, listing: &mut Listing) -> Result<()> {
        if listing.directories.is_empty() {
            return Ok(());
        }
        let prefix = prefix_with_slash(prefix);
        let names = &listing.directories;
        let keys = self.keys;
        let suspects =
            self.committer.read(|view| suspects(&Look::plain(view, keys), directory, &prefix, names));
        let looks = stream::iter(suspects.await?).map(|name| {
            let below = format!("{prefix}{name}");
            async move { Ok::<_, forebay_core::Error>(self.is_phantom(&below).await?.then_some(name)) }
        });
        let found: Vec<Option<String>> = looks.buffer_unordered(AT_ONCE).try_collect().await?;
        let phantoms: HashSet<String> = found.into_iter().flatten().collect();
        listing.directories.retain(|name| !phantoms.contains(name));
        Ok(())
    }

    /// Whether claims speak for every key below.
    async fn is_phantom(&self, prefix: &str) -> Result<bool> {
        let mut steps = self.bucket.list(prefix).try_chunks(STEP);
        while let Some(objects) = steps.next().await {
            let objects = objects.map_err(|failed| failed.1)?;
            let listed: Vec<&str> = objects.iter().map(|object| object.key.as_str()).collect();
            let keys = self.keys;
            if !self.committer.read(|view| are_claimed(&Look::plain(view, keys), &listed)).await? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// The listed names that are no directories of the tree, and have claims below.
fn suspects(look: &Look<'_, '_>, directory: InodeId, prefix: &str, names: &[String]) -> Result<Vec<String>> {
    let (start, end) = look.keys().family(Tag::Claim);
    let claims = look.reads().scan(&start, &end, MOST_CLAIMS + 1)?;
    if claims.is_empty() {
        return Ok(Vec::new());
    }
    let mut claimed: HashSet<String> = HashSet::new();
    let knows_all = claims.len() <= MOST_CLAIMS;
    for (_, value) in claims {
        let key = Claim::decode(value)?.key;
        if let Some((name, _)) = key.as_str().strip_prefix(prefix).and_then(|rest| rest.split_once('/')) {
            claimed.insert(name.to_owned());
        }
    }
    let named: Vec<&String> = names.iter().filter(|name| !knows_all || claimed.contains(*name)).collect();
    let entries: Vec<Bytes> =
        named.iter().map(|name| look.keys().dentry(directory, name.as_bytes())).collect();
    let entries: Vec<&[u8]> = entries.iter().map(|key| &key[..]).collect();
    let mut suspects = Vec::new();
    for (name, entry) in named.into_iter().zip(look.reads().get_many(&entries)?) {
        let entry = entry.map(Dentry::decode).transpose()?;
        if entry.is_none_or(|entry| entry.kind != FileKind::Directory) {
            suspects.push(name.clone());
        }
    }
    Ok(suspects)
}

/// Whether each of the keys has a claim, or lies below a prefix that has one.
fn are_claimed(look: &Look<'_, '_>, listed: &[&str]) -> Result<bool> {
    let above = |key: &str| -> Vec<Bytes> {
        let prefixes = key.match_indices('/').map(|(slash, _)| look.keys().claim(&key[..=slash]));
        prefixes.chain([look.keys().claim(key)]).collect()
    };
    let wanted: Vec<Vec<Bytes>> = listed.iter().map(|key| above(key)).collect();
    let all: Vec<&[u8]> = wanted.iter().flatten().map(|key| &key[..]).collect();
    let mut claims = look.reads().get_many(&all)?.into_iter();
    Ok(wanted.iter().all(|keys| claims.by_ref().take(keys.len()).filter(Option::is_some).count() > 0))
}
