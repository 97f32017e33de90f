//! How a file that lost bytes says which objects held them, so that they can be brought back by hand.
//!
//! What an attribute names is not freed while the file is there: bytes that come back would go again unseen.

use bytes::Bytes;
use forebay_core::{ObjectKey, Result};

use crate::schema::decode_plain;

/// The attribute: `FIRST-LAST KEY@OFFSET+LENGTH` for each run of lost bytes, with NUL between them.
pub(crate) const LOST_OBJECTS: &[u8] = b"user.forebay.lost-objects";

/// The objects that the record of an extended attribute names, if it is that attribute's. Anybody may write one: what has
/// another shape names nothing.
pub(crate) fn given_up_in(key: &[u8], value: Bytes) -> Result<Vec<ObjectKey>> {
    if !key.ends_with(LOST_OBJECTS) {
        return Ok(Vec::new());
    }
    let value = decode_plain(value, "extended attribute")?;
    let object = |run: &[u8]| {
        let (_, place) = std::str::from_utf8(run).ok()?.split_once(' ')?;
        let (key, _) = place.rsplit_once('@')?;
        Some(ObjectKey::new(key))
    };
    Ok(value.split(|byte| *byte == 0).filter_map(object).collect())
}
