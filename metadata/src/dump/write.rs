//! Writing a dump: one snapshot of the records, line by line.

use std::io::Write;

use forebay_core::{Blob, Error, ErrorKind, Extent, InodeId, Result, Source, Timestamp};
use forebay_io::codec::Compressor;
use forebay_io::task::blocking;
use futures::future::join;
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

use super::line::{End, FORMAT, Header, Line};
use crate::commit::Committer;
use crate::kv::Snapshot;
use crate::schema::Keys;

/// Records read at once.
const PAGE: usize = 1024;
/// Pages between the reader and the one that compresses and writes.
const PAGES_AHEAD: usize = 4;

/// What was dumped.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DumpReport {
    /// Records.
    pub records: u64,
    /// Bytes before compression.
    pub bytes: u64,
    /// Their checksum.
    pub blake3: String,
}

/// What came of a dump that may not name some blobs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Dumped {
    /// It is whole.
    Whole(DumpReport),
    /// It was broken off: the layout of `ino` names `blob`.
    Names {
        /// The file.
        ino: InodeId,
        /// The blob that a dump may not name.
        blob: Blob,
    },
}

/// The tree as it was at one moment, to be written.
pub struct Frozen {
    snapshot: Box<dyn Snapshot>,
    keys: Keys,
    taken: Timestamp,
}

/// Writes the tree that `committer` serves to `out`, as it is at this moment. `taken` goes into the header.
///
/// # Errors
/// `Corrupt` when a record cannot be read, `Unsupported` when this program does not know it; those of `out`.
pub async fn dump(
    committer: &Committer,
    keys: Keys,
    taken: Timestamp,
    out: impl Write + Send + 'static,
) -> Result<DumpReport> {
    match freeze(committer, keys, taken).await?.write(out, |_| false).await? {
        Dumped::Whole(report) => Ok(report),
        Dumped::Names { .. } => Err(Error::bug("a dump that may name every blob was broken off")),
    }
}

/// Holds on to the tree that `committer` serves as it is at this moment. `taken` goes into the header.
///
/// # Errors
/// Those of the engine.
pub async fn freeze(committer: &Committer, keys: Keys, taken: Timestamp) -> Result<Frozen> {
    // A snapshot holds what was synced.
    committer.sync().await?;
    if committer.engine().get(&keys.copied()).await?.is_some() {
        return Err(Error::new(ErrorKind::ReadOnly, "this is a read-only mount's copy of the tree")
            .with_hint("dump it without `read_only` among the settings, as the mount for writing has it"));
    }
    Ok(Frozen { snapshot: committer.engine().snapshot()?, keys, taken })
}

impl Frozen {
    /// Writes it to `out`, unless a layout names a blob that the dump may not name.
    ///
    /// # Errors
    /// As [`dump`].
    pub async fn write(
        self,
        out: impl Write + Send + 'static,
        may_not_name: impl Fn(&Blob) -> bool,
    ) -> Result<Dumped> {
        let (pages, mut written) = mpsc::channel::<Vec<u8>>(PAGES_AHEAD);
        let compress = blocking(move || -> Result<()> {
            let mut out = Compressor::new(out)?;
            while let Some(page) = written.blocking_recv() {
                out.write_all(&page)?;
            }
            // Flushes, too: whoever made a file of it makes that durable, and hears what comes up only then.
            out.finish().map(drop).map_err(Error::from)
        });
        let (read, compressed) = join(self.read(pages, may_not_name), compress).await;
        // Nobody takes pages any more when writing failed: that is the cause.
        compressed?.and(read)
    }

    async fn read(
        self,
        pages: mpsc::Sender<Vec<u8>>,
        may_not_name: impl Fn(&Blob) -> bool,
    ) -> Result<Dumped> {
        let Self { snapshot, keys, taken } = self;
        let gone = |_| Error::bug("the dump is not written any more");
        let mut report = DumpReport::default();
        let mut hash = blake3::Hasher::new();
        let header = Header { forebay_dump: FORMAT, volume: keys.0, taken };
        let mut text = Line::Header(header).text()?;
        let (mut start, end) = keys.all();
        loop {
            let page = snapshot.scan(&start, &end, PAGE).await?;
            let last = page.last().map(|(key, _)| [&key[..], &[0]].concat());
            for (key, value) in page {
                if let Some(line) = Line::of(keys, &key, value)? {
                    if let Some((ino, blob)) = first_blob(&line, &may_not_name) {
                        return Ok(Dumped::Names { ino, blob: blob.clone() });
                    }
                    text.extend(line.text()?);
                    report.records += 1;
                }
            }
            hash.update(&text);
            report.bytes += text.len() as u64;
            pages.send(std::mem::take(&mut text)).await.map_err(gone)?;
            match last {
                Some(last) => start = last.into(),
                None => break,
            }
        }
        report.blake3 = hash.finalize().to_hex().to_string();
        let end = Line::End(End { records: report.records, blake3: report.blake3.clone() }).text()?;
        report.bytes += end.len() as u64;
        pages.send(end).await.map_err(gone)?;
        Ok(Dumped::Whole(report))
    }
}

/// The first blob in a layout that is one of those.
fn first_blob(line: &Line, is_one: impl Fn(&Blob) -> bool) -> Option<(InodeId, &Blob)> {
    let (ino, extents): (_, &[Extent]) = match line {
        Line::Inode { ino, inode } => (*ino, &inode.extents),
        Line::Extents { ino, extents, .. } => (*ino, extents),
        _ => return None,
    };
    let mut blobs = extents.iter().filter_map(|extent| match &extent.source {
        Source::Blob { blob, .. } => Some(blob),
        Source::Inline(_) => None,
    });
    blobs.find(|blob| is_one(blob)).map(|blob| (ino, blob))
}
