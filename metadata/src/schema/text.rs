//! Bytes as text, for the portable form of records: a string where they are UTF-8, else `{"hex": "..."}`.

use bytes::Bytes;
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Text {
    Utf8(String),
    Other { hex: String },
}

pub(crate) fn serialize<S: Serializer>(bytes: &Bytes, serializer: S) -> Result<S::Ok, S::Error> {
    let text = match std::str::from_utf8(bytes) {
        Ok(text) => Text::Utf8(text.to_owned()),
        Err(_) => Text::Other { hex: bytes.iter().map(|byte| format!("{byte:02x}")).collect() },
    };
    text.serialize(serializer)
}

pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Bytes, D::Error> {
    let hex = match Text::deserialize(deserializer)? {
        Text::Utf8(text) => return Ok(text.into()),
        Text::Other { hex } => hex,
    };
    let byte = |at: usize| hex.get(at..at + 2).and_then(|digits| u8::from_str_radix(digits, 16).ok());
    let bytes: Option<Vec<u8>> = (0..hex.len()).step_by(2).map(byte).collect();
    bytes.map(Bytes::from).ok_or_else(|| D::Error::custom("bytes that are not hexadecimal"))
}
