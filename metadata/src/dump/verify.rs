//! Reading a dump line by line, and refusing a damaged one where it is damaged.

use std::io::{BufRead, Read};

use forebay_core::{Error, ErrorKind, Result};
use forebay_io::codec::Decompressor;

use super::line::{End, FORMAT, Header, Line};

/// The longest line in bytes: an extended attribute of 64 KiB, spelled out, is far below.
const MOST_LINE_BYTES: u64 = 16 << 20;

/// The lines of a dump.
pub(super) struct Lines<R: Read> {
    from: Decompressor<R>,
    /// Where the next line begins, in bytes before compression.
    at: u64,
    /// Where the last one that was read does.
    line: u64,
    hash: blake3::Hasher,
    records: u64,
}

impl<R: Read> Lines<R> {
    /// Reads the header.
    ///
    /// # Errors
    /// `Corrupt` when there is none; `Unsupported` when a newer Forebay wrote it.
    pub(super) fn begin(from: R) -> Result<(Header, Self)> {
        let from = Decompressor::new(from).map_err(|error| damaged(0, error))?;
        let mut lines = Self { from, at: 0, line: 0, hash: blake3::Hasher::new(), records: 0 };
        let text = lines.next_text()?;
        match serde_json::from_slice(&text) {
            Ok(Line::Header(header)) if header.forebay_dump > FORMAT => {
                let message =
                    format!("the dump has format {}, this program knows {FORMAT}", header.forebay_dump);
                Err(Error::new(ErrorKind::Unsupported, message).with_hint("use a newer Forebay"))
            }
            Ok(Line::Header(header)) => {
                lines.take(&text);
                Ok((header, lines))
            }
            _ => Err(damaged(0, "it has no header")),
        }
    }

    /// The next record; `None` after the last, when all that was read proved to be what was written.
    ///
    /// # Errors
    /// `Corrupt`, with the offset.
    pub(super) fn next(&mut self) -> Result<Option<Line>> {
        self.line = self.at;
        let text = self.next_text()?;
        let line: Line = serde_json::from_slice(&text).map_err(|error| damaged(self.at, error))?;
        match &line {
            Line::End(end) => self.finish(end, text.len() as u64).map(|()| None),
            Line::Header(_) => Err(damaged(self.at, "a second header")),
            _ => {
                self.take(&text);
                self.records += 1;
                Ok(Some(line))
            }
        }
    }

    /// That the line read last makes no tree.
    pub(super) fn damaged(&self, why: impl std::fmt::Display) -> Error {
        damaged(self.line, why)
    }

    fn next_text(&mut self) -> Result<Vec<u8>> {
        let mut text = Vec::new();
        let at = self.at;
        let read = self.from.by_ref().take(MOST_LINE_BYTES).read_until(b'\n', &mut text);
        read.map_err(|error| damaged(at + text.len() as u64, error))?;
        match text.last() {
            Some(b'\n') => Ok(text),
            _ => Err(damaged(at + text.len() as u64, "it ends in the middle")),
        }
    }

    fn take(&mut self, text: &[u8]) {
        self.hash.update(text);
        self.at += text.len() as u64;
    }

    fn finish(&mut self, end: &End, length: u64) -> Result<()> {
        let found = self.hash.finalize().to_hex().to_string();
        if (end.records, &end.blake3) != (self.records, &found) {
            return Err(damaged(self.at, format!("its checksum is {}, expected {found}", end.blake3)));
        }
        let after = self.at + length;
        match self.from.read(&mut [0]) {
            Ok(0) => Ok(()),
            Ok(_) => Err(damaged(after, "more follows its end")),
            Err(error) => Err(damaged(after, error)),
        }
    }
}

fn damaged(at: u64, why: impl std::fmt::Display) -> Error {
    let hint = match at {
        0 => "nothing was changed by it; is it a file that `forebay volume dump` wrote?",
        _ => "nothing was changed by it; offsets count bytes before compression, as `zstd -dc` shows them",
    };
    Error::corrupt(format!("the dump is damaged at byte {at}: {why}")).with_hint(hint)
}
