//! One function per kind of reply: a result in, an answer to the kernel out.

use std::time::Duration;

use bytes::Bytes;
use forebay_core::Attributes;
use forebay_metadata::tree::Blocker;
use fuser::{
    FileHandle, FopenFlags, Generation, ReplyAttr, ReplyCreate, ReplyData, ReplyEmpty, ReplyEntry, ReplyLock,
    ReplyLseek, ReplyOpen, ReplyStatfs, ReplyWrite, ReplyXattr,
};

use super::convert;
use crate::errno::FsResult;
use crate::fs::{Opened, Space, XattrReply};

/// Inode numbers are never reused, so that they need no generation beside them.
pub(super) const GENERATION: Generation = Generation(0);
/// Unit of statfs.
const SPACE_BLOCK_BYTES: u64 = 4096;
/// Longest name in bytes.
const NAME_MAX: u32 = 255;

pub(super) fn empty(reply: ReplyEmpty, result: FsResult<()>) {
    match result {
        Ok(()) => reply.ok(),
        Err(errno) => reply.error(convert::errno(errno)),
    }
}

/// For what names entries.
pub(super) fn renamed(reply: ReplyEmpty, result: FsResult<()>) {
    match result {
        Ok(()) => reply.ok(),
        Err(errno) => reply.error(convert::named(errno)),
    }
}

pub(super) fn entry(reply: ReplyEntry, ttl: Duration, result: FsResult<Attributes>) {
    found(reply, ttl, result.map(Some));
}

pub(super) fn found(reply: ReplyEntry, ttl: Duration, result: FsResult<Option<Attributes>>) {
    match result {
        Ok(Some(attributes)) => reply.entry(&ttl, &convert::attributes(&attributes), GENERATION),
        Ok(None) => reply.entry(&ttl, &convert::miss(), GENERATION),
        Err(errno) => reply.error(convert::errno(errno)),
    }
}

pub(super) fn attributes(reply: ReplyAttr, ttl: Duration, result: FsResult<Attributes>) {
    match result {
        Ok(attributes) => reply.attr(&ttl, &convert::attributes(&attributes)),
        Err(errno) => reply.error(convert::errno(errno)),
    }
}

pub(super) fn data(reply: ReplyData, result: FsResult<Bytes>) {
    match result {
        Ok(bytes) => reply.data(&bytes),
        Err(errno) => reply.error(convert::errno(errno)),
    }
}

pub(super) fn written(reply: ReplyWrite, result: FsResult<u32>) {
    match result {
        Ok(count) => reply.written(count),
        Err(errno) => reply.error(convert::errno(errno)),
    }
}

pub(super) fn offset(reply: ReplyLseek, result: FsResult<u64>) {
    match result {
        Ok(offset) => reply.offset(offset as i64),
        Err(errno) => reply.error(convert::errno(errno)),
    }
}

pub(super) fn blocker(reply: ReplyLock, result: FsResult<Option<Blocker>>) {
    match result {
        Ok(Some(Blocker { range, kind, pid })) => {
            reply.locked(range.first, range.last, convert::lock_type(kind), pid)
        }
        Ok(None) => reply.locked(0, 0, libc::F_UNLCK, 0),
        Err(errno) => reply.error(convert::errno(errno)),
    }
}

pub(super) fn xattr(reply: ReplyXattr, result: FsResult<XattrReply>) {
    match result {
        Ok(XattrReply::Size(size)) => reply.size(size),
        Ok(XattrReply::Value(value)) => reply.data(&value),
        Err(errno) => reply.error(convert::errno(errno)),
    }
}

pub(super) fn opened(reply: ReplyOpen, result: FsResult<Opened>) {
    match result {
        Ok(opened) => reply.opened(FileHandle(opened.handle.0), open_flags(opened)),
        Err(errno) => reply.error(convert::errno(errno)),
    }
}

pub(super) fn created(reply: ReplyCreate, ttl: Duration, result: FsResult<(Attributes, Opened)>) {
    match result {
        Ok((attributes, opened)) => reply.created(
            &ttl,
            &convert::attributes(&attributes),
            GENERATION,
            FileHandle(opened.handle.0),
            open_flags(opened),
        ),
        Err(errno) => reply.error(convert::errno(errno)),
    }
}

fn open_flags(opened: Opened) -> FopenFlags {
    let mut flags = FopenFlags::empty();
    flags.set(FopenFlags::FOPEN_KEEP_CACHE, opened.keep_cache);
    flags.set(FopenFlags::FOPEN_NOFLUSH, !opened.flushes);
    flags.set(FopenFlags::FOPEN_DIRECT_IO, opened.direct);
    flags
}

pub(super) fn space(reply: ReplyStatfs, result: FsResult<Space>) {
    match result {
        Ok(space) => {
            let free = space.free_bytes / SPACE_BLOCK_BYTES;
            reply.statfs(
                space.used_bytes.div_ceil(SPACE_BLOCK_BYTES) + free,
                free,
                free,
                space.used_inodes + space.free_inodes,
                space.free_inodes,
                SPACE_BLOCK_BYTES as u32,
                NAME_MAX,
                SPACE_BLOCK_BYTES as u32,
            );
        }
        Err(errno) => reply.error(convert::errno(errno)),
    }
}
