//! What the end-to-end and structural tests share. Test code: nothing here is used by a shipped package.

pub mod tidy;
