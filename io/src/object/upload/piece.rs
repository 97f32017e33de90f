//! What was written to an upload and not cut into a part yet.

use bytes::{Bytes, BytesMut};

use crate::mem::Permit;

/// Bytes and what charges them.
#[derive(Debug)]
pub(super) struct Piece {
    pub(super) data: Bytes,
    pub(super) permit: Option<Permit>,
}

/// Pieces of fewer bytes are put together with those before them.
const SMALL: usize = 4 << 10;
/// Bytes up to which they are.
const GATHERED: usize = 64 << 10;

impl Piece {
    /// This piece and the `next` one, which are one where that is short.
    pub(super) fn with(self, next: Self) -> impl Iterator<Item = Self> {
        if next.data.len() >= SMALL || self.data.len() + next.data.len() > GATHERED {
            return [Some(self), Some(next)].into_iter().flatten();
        }
        let Self { data, mut permit } = self;
        // Where somebody else has those bytes, too, they are copied, once.
        let mut whole = data.try_into_mut().unwrap_or_else(|data| BytesMut::from(&data[..]));
        whole.extend_from_slice(&next.data);
        match (&mut permit, next.permit) {
            (Some(permit), Some(other)) => {
                permit.join(other);
                permit.shrink(whole.len() as u64);
            }
            (None, other) => permit = other,
            (Some(_), None) => {}
        }
        [Some(Self { data: whole.freeze(), permit }), None].into_iter().flatten()
    }

    /// Takes the first `bytes` off, with their share of the permit.
    pub(super) fn split_to(&mut self, bytes: usize) -> Self {
        let permit = self.permit.as_mut().map(|permit| permit.split(bytes as u64));
        Self { data: self.data.split_to(bytes), permit }
    }
}
