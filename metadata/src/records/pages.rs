//! All records of a family, page by page: no walk holds the tree up, however large it is.

use std::time::Duration;

use bytes::Bytes;
use forebay_core::Result;
use forebay_io::clock::Clock;

use crate::commit::{Committer, Reads};
use crate::kv::Pair;
use crate::schema::{Keys, Tag};

/// Records of one page.
const PAGE: usize = 1024;

/// A walk's way through the records.
#[derive(Clone)]
pub(crate) struct Pages<'a> {
    pub(crate) committer: &'a Committer,
    pub(crate) keys: Keys,
    pub(crate) clock: &'a Clock,
    /// How long to rest after each page.
    pub(crate) pause: Duration,
}

impl Pages<'_> {
    /// Shows `each` every record of a family, in key order. Records that come or go meanwhile may be shown or not.
    pub(crate) async fn each(
        &self,
        tag: Tag,
        mut each: impl FnMut(Bytes, Bytes) -> Result<()> + Send,
    ) -> Result<()> {
        let (mut start, end) = self.keys.family(tag);
        loop {
            let (from, to) = (start.clone(), end.clone());
            let page: Vec<Pair> = self.committer.read(move |view| view.scan(&from, &to, PAGE)).await?;
            let is_last = page.len() < PAGE;
            if let Some((last, _)) = page.last() {
                start = [&last[..], &[0]].concat().into();
            }
            page.into_iter().try_for_each(|(key, value)| each(key, value))?;
            if is_last {
                return Ok(());
            }
            match self.pause.is_zero() {
                true => tokio::task::yield_now().await,
                false => self.clock.sleep(self.pause).await,
            }
        }
    }
}
