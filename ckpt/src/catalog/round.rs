//! Which try of a save: a job may save a step a second time where the first time came to nothing.

use std::fmt;

use serde::de::{self, Deserialize, Deserializer};
use serde::ser::{Serialize, Serializer};

/// One try of a save, by a random number that rank 0 took and told all ranks; written as 16 lowercase hex digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Round(u64);

impl Round {
    /// The one of that number.
    pub fn new(number: u64) -> Self {
        Self(number)
    }

    /// The one in which the agents of a start bring home what an earlier start left.
    pub fn of_heirs(nonce: &str) -> Self {
        let [a, b, c, d, e, f, g, h, ..] = *blake3::hash(nonce.as_bytes()).as_bytes();
        Self(u64::from_be_bytes([a, b, c, d, e, f, g, h]))
    }

    /// Its number.
    pub(crate) fn number(self) -> u64 {
        self.0
    }

    /// Reads one; `None` for a text that stands for none.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let round = Self(u64::from_str_radix(text, 16).ok()?);
        (round.to_string() == text).then_some(round)
    }
}

impl fmt::Display for Round {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl Serialize for Round {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Round {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let wrong = || de::Error::invalid_value(de::Unexpected::Str(&text), &"16 lowercase hex digits");
        Self::parse(&text).ok_or_else(wrong)
    }
}
