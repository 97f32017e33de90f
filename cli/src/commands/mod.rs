//! The commands, one file each.

pub(crate) mod mount;
pub(crate) mod meta;
pub(crate) mod warmup;
pub(crate) mod status;
pub(crate) mod refresh;
pub(crate) mod sync;
pub(crate) mod gc;
pub(crate) mod fsck;
pub(crate) mod packed;
mod adopt;
pub(crate) mod volume;
pub(crate) mod clone;
pub(crate) mod trash;
pub(crate) mod quota;
pub(crate) mod doctor;
pub(crate) mod ckpt_keep;
pub(crate) mod ckpt_ranks;
pub(crate) mod ckpt_compare;
pub(crate) mod ckpt_convert;
pub(crate) mod ckpt_show;
pub(crate) mod ckpt;
pub(crate) mod version;
