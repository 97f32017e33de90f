//! Compressed streams: zstd, with its checksum in every frame.
//!
//! Owns the one compression library. Blocks on what it reads from and writes to.

use std::io::{self, BufRead, BufReader, Read, Write};

use zstd::stream::{read::Decoder, write::Encoder};

/// The library's own default: about as fast as a disk takes it.
const LEVEL: i32 = 3;
/// What a stream begins with (RFC 8878, 3.1.1).
const MAGIC: [u8; 4] = 0xFD2F_B528_u32.to_le_bytes();

/// Bytes as a stream.
pub fn pack(bytes: &[u8]) -> io::Result<Vec<u8>> {
    let mut packed = Compressor::new(Vec::new())?;
    packed.write_all(bytes)?;
    packed.finish()
}

/// Whether bytes are a stream, and no text.
pub fn is_packed(bytes: &[u8]) -> bool {
    bytes.starts_with(&MAGIC)
}

/// What was packed, up to so many bytes.
///
/// # Errors
/// Where it is cut short or altered, or more.
pub fn unpack(packed: &[u8], most: usize) -> io::Result<Vec<u8>> {
    let (mut bytes, mut from) = (Vec::new(), Decompressor::new(packed)?.take(most as u64 + 1));
    from.read_to_end(&mut bytes)?;
    match bytes.len() > most {
        true => Err(io::Error::new(io::ErrorKind::InvalidData, format!("more than {most} bytes"))),
        false => Ok(bytes),
    }
}

/// Compresses what is written to it.
pub struct Compressor<W: Write>(Encoder<'static, W>);

impl<W: Write> Compressor<W> {
    /// Starts a stream into `out`.
    pub fn new(out: W) -> io::Result<Self> {
        let mut encoder = Encoder::new(out, LEVEL)?;
        encoder.include_checksum(true)?;
        Ok(Self(encoder))
    }

    /// Ends the stream, without which it cannot be read whole.
    pub fn finish(self) -> io::Result<W> {
        let mut out = self.0.finish()?;
        out.flush().map(|()| out)
    }
}

impl<W: Write> Write for Compressor<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// Reads what a [`Compressor`] wrote; a stream that is cut short or altered is an error, at the latest at its end.
pub struct Decompressor<R: Read>(BufReader<Decoder<'static, BufReader<R>>>);

impl<R: Read> Decompressor<R> {
    /// Starts at the beginning of a stream.
    pub fn new(from: R) -> io::Result<Self> {
        Ok(Self(BufReader::new(Decoder::new(from)?)))
    }
}

impl<R: Read> Read for Decompressor<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.0.read(into)
    }
}

impl<R: Read> BufRead for Decompressor<R> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        self.0.fill_buf()
    }

    fn consume(&mut self, bytes: usize) {
        self.0.consume(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_packed_is_unpacked_up_to_a_limit() {
        let text = b"{\"all\": 1}".repeat(1000);
        let packed = pack(&text).expect("packed");
        assert!(is_packed(&packed) && !is_packed(&text) && packed.len() < 100);
        assert_eq!(unpack(&packed, text.len()).expect("whole"), text);
        unpack(&packed, text.len() - 1).expect_err("more");
        unpack(&packed[..packed.len() - 1], text.len()).expect_err("cut short");
    }

    #[test]
    fn streams_round_trip_and_damage_is_an_error() {
        let text: Vec<u8> = (0..100_000u32).flat_map(|at| (at / 7).to_le_bytes()).collect();
        let mut out = Compressor::new(Vec::new()).expect("a stream");
        out.write_all(&text).expect("written");
        let whole = out.finish().expect("finished");
        let read = |stream: &[u8]| {
            let mut read = Vec::new();
            Decompressor::new(stream).and_then(|mut from| from.read_to_end(&mut read)).map(|_| read)
        };
        assert!(whole.len() < text.len() && read(&whole).expect("whole") == text);
        for at in (0..whole.len()).step_by(whole.len() / 97) {
            assert!(read(&whole[..at]).is_err() || at == 0, "cut at {at}");
            let mut altered = whole.clone();
            altered[at] ^= 0x40;
            assert!(read(&altered).map_or(true, |read| read == text), "altered at {at}");
        }
    }
}
