//! Writing a dump: one snapshot of the records, line by line.

use std::io::Write;

use forebay_core::{Error, Result, Timestamp};
use forebay_io::codec::Compressor;
use forebay_io::task::blocking;
use futures::future::join;
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

use super::line::{End, FORMAT, Header, Line};
use crate::commit::Committer;
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
    let (pages, mut written) = mpsc::channel::<Vec<u8>>(PAGES_AHEAD);
    let compress = blocking(move || -> Result<()> {
        let mut out = Compressor::new(out)?;
        while let Some(page) = written.blocking_recv() {
            out.write_all(&page)?;
        }
        out.finish().map(drop).map_err(Error::from)
    });
    let (read, compressed) = join(read(committer, keys, taken, pages), compress).await;
    // Nobody takes pages any more when writing failed: that is the cause.
    compressed?.and(read)
}

async fn read(
    committer: &Committer,
    keys: Keys,
    taken: Timestamp,
    pages: mpsc::Sender<Vec<u8>>,
) -> Result<DumpReport> {
    let gone = |_| Error::bug("the dump is not written any more");
    // A snapshot holds what was synced.
    committer.sync().await?;
    let snapshot = committer.engine().snapshot()?;
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
    Ok(report)
}
