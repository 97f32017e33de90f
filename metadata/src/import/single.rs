//! One name of a directory whose first listing takes long: it is asked for alone, beside the listing, which goes on.

use bytes::Bytes;
use forebay_core::{InodeId, ObjectKey, Result};
use forebay_io::object::{Bucket, Listing, Scheme};
use tracing::debug;

use super::importer::Importer;
use super::items::{Items, OBJECT_SUFFIX};
use super::phantoms::Phantoms;
use super::reconcile::{Work, reconcile_one};
use crate::records::{Change, is_reserved};

/// Whether one key and what is below it tell what a listing has under a name. A folder lists directories that hold nothing, and Azure
/// those that hold a marker alone.
fn tells_of_names(bucket: &Bucket) -> bool {
    matches!(bucket.url().scheme, Scheme::S3 | Scheme::Gcs)
}

impl Importer {
    /// Looks for `name` alone while `directory` is listed, until `listed`. Returns whether the tree is right about it: else the
    /// listing is to be waited for.
    pub(super) async fn look_alone(
        &self,
        directory: InodeId,
        name: &[u8],
        listed: impl Future<Output = ()>,
    ) -> Result<bool> {
        let (bucket, committer, keys) = (self.bucket(), self.committer(), self.shared().keys);
        let Some(text) = std::str::from_utf8(name).ok().filter(|_| tells_of_names(bucket)) else {
            return Ok(false);
        };
        // What lies beside a directory has that one's key.
        if is_reserved(directory, name) || name.ends_with(OBJECT_SUFFIX) {
            return Ok(false);
        }
        let Some((number, prefix)) = self.shared().touched.under_way(directory) else { return Ok(false) };
        let key = format!("{prefix}{text}");
        if self.shared().touched.is(directory, name, &key) {
            return Ok(true);
        }
        let object = ObjectKey::new(&key);
        let (object, has_below) = tokio::select! {
            biased;
            () = listed => return Ok(false),
            answers = async { futures::try_join!(bucket.head(&object), bucket.has_below(&key)) } => answers?,
        };
        debug!(%directory, key, is_object = object.is_some(), has_below, "looked for one name");
        let directories = has_below.then(|| text.to_owned()).into_iter().collect();
        let mut listing = Listing { directories, ..Listing::default() };
        let prefix = prefix.trim_end_matches('/').to_owned();
        Phantoms { bucket, committer, keys }.drop(directory, &prefix, &mut listing).await?;
        // Beside a directory it has another name.
        if listing.directories.is_empty() {
            listing.objects.extend(object);
        }
        let items = Items::of(directory, &prefix, listing);
        let (work, name) = (Work { directory, prefix, items }, Bytes::copy_from_slice(name));
        let one = move |change: &mut Change<'_, '_>| {
            let is_right = reconcile_one(change, &work, number, &name)?;
            Ok((is_right, std::mem::take(&mut change.outside)))
        };
        let (is_right, changes) = self.transact(one).await?;
        changes.into_iter().for_each(|change| self.shared().outside.tell(change));
        Ok(is_right)
    }
}
