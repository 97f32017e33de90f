//! Intents: what is about to be written to a key, and how what comes there is known.

use bytes::Bytes;
use forebay_core::{Blob, ObjectKey, Result, Timestamp, Version};
use serde::{Deserialize, Serialize};

use super::codec::{Decoder, Encoder};

/// `W ino`: a plain object is about to be written for an inode.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Intent {
    /// Where.
    pub key: ObjectKey,
    /// What was there when the intent was made; `None` when nothing was.
    pub replaces: Option<Version>,
    /// What the mover copies there; `None` when a writer brings new content.
    pub copies: Option<Blob>,
    /// How what a writer brings is known; `None` in records of before this was kept, and for the mover.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mark: Option<Mark>,
}

/// How the object that an intent announces is told from another's.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mark {
    /// What the object carries: [`forebay_io::object::Bucket::put_as`].
    pub token: String,
    /// When the intent was made, by the local clock.
    pub made: Timestamp,
    /// What the file was then; `None` in records of before this was kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub of: Option<Announced>,
    /// Earlier writes to the same key that were not answered, and may still come: newest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub earlier: Vec<Earlier>,
}

/// A write of which nobody waits for an answer any more.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Earlier {
    /// What its object carries.
    pub token: String,
    /// What the file was when its intent was made.
    pub of: Announced,
}

impl Mark {
    /// Earlier writes that are remembered: more would have to be given up within five minutes.
    const MOST_EARLIER: usize = 16;

    /// What an intent says that takes the place of this one while that may still come.
    pub fn and_earlier(self) -> Vec<Earlier> {
        let own = self.of.map(|of| Earlier { token: self.token, of });
        own.into_iter().chain(self.earlier).take(Self::MOST_EARLIER).collect()
    }

    /// Whether an object that carries `token` is what was announced here, or earlier.
    pub fn names(&self, token: &str) -> bool {
        self.token == token || self.earlier.iter().any(|earlier| earlier.token == token)
    }
}

/// Which content an intent announces.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Announced {
    /// The file's generation when the intent was made.
    pub generation: u64,
    /// Whether the bytes are those of that generation, which lie elsewhere, or new ones.
    pub seals: bool,
}

impl Announced {
    /// Whether newer content was committed since.
    pub fn is_outdone(self, generation: u64) -> bool {
        self.generation < generation
    }

    fn encode(self, out: &mut Encoder) {
        out.number(self.generation);
        out.byte(u8::from(self.seals));
    }

    fn decode(from: &mut Decoder) -> Result<Self> {
        match (from.number()?, from.byte()?) {
            (generation, seals @ (0 | 1)) => Ok(Self { generation, seals: seals == 1 }),
            (_, other) => Err(from.bad(&format!("announces content of the type {other}"))),
        }
    }
}

impl Intent {
    /// What a writer announced, as far as it is known.
    pub fn announced(&self) -> Option<Announced> {
        self.mark.as_ref()?.of
    }

    /// Whether newer content than the one that a writer announced was committed since.
    pub fn is_outdone(&self, generation: u64) -> bool {
        self.announced().is_some_and(|announced| announced.is_outdone(generation))
    }

    /// The record.
    pub fn encode(&self) -> Bytes {
        let mut out = Encoder::new();
        out.bytes(self.key.as_str().as_bytes());
        out.optional(self.replaces.as_ref(), |out, version| out.bytes(version.as_str().as_bytes()));
        match (&self.copies, &self.mark) {
            (Some(blob), _) => {
                out.byte(1);
                out.blob(blob);
            }
            (None, Some(mark)) => {
                out.byte(match (mark.of, mark.earlier.len()) {
                    (None, _) => 2,
                    (Some(_), 0) => 3,
                    (Some(_), _) => 4,
                });
                out.bytes(mark.token.as_bytes());
                out.time(mark.made);
                if let Some(of) = mark.of {
                    of.encode(&mut out);
                    if !mark.earlier.is_empty() {
                        out.number(mark.earlier.len() as u64);
                    }
                    for Earlier { token, of } in &mark.earlier {
                        out.bytes(token.as_bytes());
                        of.encode(&mut out);
                    }
                }
            }
            (None, None) => out.byte(0),
        }
        out.finish()
    }

    /// Reads the record.
    pub fn decode(value: Bytes) -> Result<Self> {
        let mut from = Decoder::new(value, "intent")?;
        let (key, replaces) = (from.object_key()?, from.optional(Decoder::version)?);
        let (copies, mark) = match from.byte()? {
            0 => (None, None),
            1 => (Some(from.blob()?), None),
            2 => {
                let (token, made) = (from.text()?, from.time()?);
                (None, Some(Mark { token, made, of: None, earlier: Vec::new() }))
            }
            known @ (3 | 4) => {
                let (token, made) = (from.text()?, from.time()?);
                let of = Some(Announced::decode(&mut from)?);
                let count = if known == 4 { from.number()? } else { 0 };
                let each = (0..count)
                    .map(|_| Ok(Earlier { token: from.text()?, of: Announced::decode(&mut from)? }));
                let earlier = each.collect::<Result<_>>()?;
                (None, Some(Mark { token, made, of, earlier }))
            }
            other => return Err(from.bad(&format!("is of the type {other}"))),
        };
        from.finish()?;
        Ok(Self { key, replaces, copies, mark })
    }
}
