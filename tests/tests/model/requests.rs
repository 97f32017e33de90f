//! The calls of the layer without a kernel: what the kernel checks before a request, and the requests.

use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use bytes::Bytes;
use forebay_core::{Attributes, FileKind, Timestamp};
use forebay_fuse::fs::{Change, Listed, OpenFlags, TimeChange, XattrReply};

use super::super::calls::{Answer, Called, Calls, Kind, Seen, Status};
use super::super::operation::{List, Operation, PAGE, Time};
use super::{CALLER, Descriptor, Layer, Mapped, OWNER, Place, REQUEST_BYTES};

/// Entries that one READDIR takes: few, so that listings go on from where they were.
const TAKEN: usize = 3;
/// Bytes of the longest name: NAME_MAX of limits.h.
const NAME_MAX: usize = 255;

fn is_list(name: &str) -> bool {
    name == List::ACCESS || name == List::DEFAULT
}

/// Whether an access control list may be set, or taken away.
fn check_list(found: &Attributes, name: &str, sets: bool) -> Called<()> {
    match found.kind {
        FileKind::Symlink => Err(libc::EOPNOTSUPP),
        FileKind::Directory => Ok(()),
        _ if sets && name == List::DEFAULT => Err(libc::EACCES),
        _ => Ok(()),
    }
}

fn kind(kind: FileKind) -> Kind {
    match kind {
        FileKind::File => Kind::File,
        FileKind::Directory => Kind::Folder,
        FileKind::Symlink => Kind::Symlink,
        FileKind::Fifo => Kind::Pipe,
        FileKind::Socket => Kind::Socket,
        FileKind::CharDevice => Kind::CharDevice,
        FileKind::BlockDevice => Kind::BlockDevice,
    }
}

fn seen(time: Timestamp) -> Seen {
    Seen::new(time.seconds, time.nanos)
}

fn status(attributes: &Attributes) -> Status {
    let rdev = attributes.rdev;
    let status = Status {
        kind: kind(attributes.kind),
        mode: u32::from(attributes.mode),
        links: u64::from(attributes.nlink),
        user: attributes.uid,
        group: attributes.gid,
        size: attributes.size,
        // As the kernel packs both numbers (linux/kdev_t.h).
        device: (rdev >> 8 & 0xfff, rdev & 0xff | rdev >> 12 & 0xf_ff00),
        accessed: seen(attributes.atime),
        modified: seen(attributes.mtime),
    };
    status.promised()
}

fn time_change(time: Time) -> Option<TimeChange> {
    match time {
        Time::Keep => None,
        Time::Now => Some(TimeChange::Now),
        Time::At(seconds, nanos) => Some(TimeChange::At(Timestamp { seconds, nanos })),
    }
}

fn bytes(reply: XattrReply) -> Bytes {
    match reply {
        XattrReply::Value(value) => value,
        XattrReply::Size(size) => panic!("{size} bytes where a value was asked for"),
    }
}

impl Layer {
    fn remove_attribute(&self, found: &Attributes, name: &str) -> Called<()> {
        self.ask(self.fs.remove_xattr(found.ino, name.as_bytes()))
    }

    /// What has no default list is not asked to lose one.
    fn remove_list(&self, found: &Attributes, name: &str) -> Called<()> {
        check_list(found, name, false)?;
        let has_none = name == List::DEFAULT && found.kind != FileKind::Directory;
        if has_none { Ok(()) } else { self.remove_attribute(found, name) }
    }
}

impl Calls for Layer {
    fn open(&mut self, path: &Path, flags: i32, mode: u32) -> Called<usize> {
        let (create, alone) = (flags & libc::O_CREAT != 0, flags & libc::O_EXCL != 0);
        let follow = flags & libc::O_NOFOLLOW == 0 && !(create && alone);
        let place = self.walk(path, follow)?;
        let descriptor = match place.found {
            Some(found) => self.open_found(&found, flags)?,
            None if create => {
                let Place { parent, name, .. } = place;
                let made = self.fs.create(CALLER, parent, &name, mode as u16, OpenFlags(flags));
                let (made, opened) = self.ask(made)?;
                let ino = self.noted(made).ino;
                Descriptor { ino, handle: opened.handle, folder: false, flags }
            }
            None => return Err(libc::ENOENT),
        };
        Ok(self.keep(descriptor))
    }

    fn close(&mut self, file: usize) -> Called<()> {
        let Descriptor { ino, handle, folder, .. } = self.open.remove(&file).ok_or(libc::EBADF)?;
        self.references.push(ino);
        if folder {
            return self.fs.release_directory(handle).map_err(|errno| errno.0);
        }
        let closed = self.ask(self.fs.close(handle, OWNER));
        closed.and(self.ask(self.fs.release(handle)))
    }

    fn read(&mut self, file: usize, offset: u64, length: usize) -> Called<Vec<u8>> {
        let at = self.at(file);
        match at {
            _ if !at.reads() => return Err(libc::EBADF),
            _ if at.folder => return Err(libc::EISDIR),
            _ => {}
        }
        let mut bytes = Vec::new();
        while bytes.len() < length {
            let wanted = (length - bytes.len()).min(REQUEST_BYTES);
            let read = self.fs.read(at.ino, at.handle, offset + bytes.len() as u64, wanted as u32);
            let read = self.ask(read)?;
            bytes.extend_from_slice(&read);
            if read.len() < wanted {
                break;
            }
        }
        Ok(bytes)
    }

    fn write(&mut self, file: usize, offset: u64, bytes: &[u8]) -> Called<()> {
        let at = self.at(file);
        if !at.writes() {
            return Err(libc::EBADF);
        }
        let mut offset = match at.flags & libc::O_APPEND {
            0 => offset,
            _ => self.ask(self.fs.attributes(at.ino))?.size,
        };
        for part in bytes.chunks(REQUEST_BYTES) {
            self.fs.note_writer(at.handle, Some(OWNER));
            let data = Bytes::copy_from_slice(part);
            let written = self.ask(self.fs.write(at.ino, at.handle, offset, data))?;
            assert_eq!(written as usize, part.len(), "a request is written whole");
            offset += u64::from(written);
        }
        Ok(())
    }

    fn set_size(&mut self, file: usize, size: u64) -> Called<()> {
        let at = self.at(file);
        if at.folder || !at.writes() {
            return Err(libc::EINVAL);
        }
        self.change(at.ino, Change { size: Some(size), ..Change::default() })
    }

    fn sync(&mut self, file: usize) -> Called<()> {
        let at = self.at(file);
        match at.folder {
            true => self.ask(self.fs.sync_directory(at.ino)),
            false => self.ask(self.fs.sync_file(at.handle)),
        }
    }

    fn allocate(&mut self, file: usize, mode: i32, offset: u64, length: u64) -> Called<()> {
        let at = self.at(file);
        let known = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;
        let (punch, collapse) = (libc::FALLOC_FL_PUNCH_HOLE, libc::FALLOC_FL_COLLAPSE_RANGE);
        match mode {
            _ if length == 0 => Err(libc::EINVAL),
            mode if mode & punch != 0 && mode & libc::FALLOC_FL_KEEP_SIZE == 0 => Err(libc::EOPNOTSUPP),
            mode if mode & !(known | collapse) != 0 => Err(libc::EOPNOTSUPP),
            _ if !at.writes() => Err(libc::EBADF),
            mode if mode & !known != 0 => Err(libc::EOPNOTSUPP),
            _ => self.ask(self.fs.allocate(at.ino, at.handle, mode, offset, length)),
        }
    }

    fn seek(&mut self, file: usize, offset: u64, whence: i32) -> Called<u64> {
        let at = self.at(file);
        self.ask(self.fs.seek(at.ino, at.handle, offset.cast_signed(), whence))
    }

    fn copy(&mut self, from: (usize, u64), to: (usize, u64), length: usize) -> Called<usize> {
        let (source, target) = (self.at(from.0), self.at(to.0));
        match () {
            () if source.folder || target.folder => return Err(libc::EISDIR),
            () if !source.reads() || !target.writes() || target.flags & libc::O_APPEND != 0 => {
                return Err(libc::EBADF);
            }
            () => {}
        }
        let left = self.ask(self.fs.attributes(source.ino))?.size.saturating_sub(from.1);
        let length = left.min(length as u64);
        if source.ino == target.ino && to.1 + length > from.1 && to.1 < from.1 + length {
            return Err(libc::EINVAL);
        }
        if length == 0 {
            return Ok(0);
        }
        let (inside, into) = ((source.ino, source.handle, from.1), (target.ino, target.handle, to.1));
        match self.ask(self.fs.copy_range(inside, into, length, false)) {
            Err(libc::EOPNOTSUPP) => {
                let bytes = self.read(from.0, from.1, length as usize)?;
                self.write(to.0, to.1, &bytes).map(|()| bytes.len())
            }
            copied => copied.map(|copied| copied as usize),
        }
    }

    fn status(&mut self, file: usize) -> Called<Status> {
        self.ask(self.fs.attributes(self.at(file).ino)).map(|found| status(&found))
    }

    fn make_folder(&mut self, path: &Path, mode: u32) -> Called<()> {
        let Place { parent, name, .. } = self.walk(path, false)?;
        // Set-id bits are not mkdir's to give.
        let made = self.ask(self.fs.make_directory(CALLER, parent, &name, mode as u16 & 0o1777))?;
        self.noted(made);
        Ok(())
    }

    fn make_node(&mut self, path: &Path, kind: Kind, mode: u32, (major, minor): (u32, u32)) -> Called<()> {
        let Place { parent, name, .. } = self.walk(path, false)?;
        let kind = match kind {
            Kind::Pipe => FileKind::Fifo,
            Kind::Socket => FileKind::Socket,
            Kind::CharDevice => FileKind::CharDevice,
            Kind::BlockDevice => FileKind::BlockDevice,
            other => unreachable!("{other:?} is no node"),
        };
        let device = major << 8 | minor & 0xff | (minor & 0xf_ff00) << 12;
        let made = self.fs.make_node(CALLER, parent, &name, kind, mode as u16, device);
        let made = self.ask(made)?;
        self.noted(made);
        Ok(())
    }

    fn symlink(&mut self, target: &Path, path: &Path) -> Called<()> {
        let Place { parent, name, .. } = self.walk(path, false)?;
        let target = Bytes::copy_from_slice(target.as_os_str().as_bytes());
        let made = self.ask(self.fs.make_symlink(CALLER, parent, &name, target))?;
        self.noted(made);
        Ok(())
    }

    fn read_link(&mut self, path: &Path) -> Called<Vec<u8>> {
        let found = self.find(path, false)?;
        if found.kind != FileKind::Symlink {
            return Err(libc::EINVAL);
        }
        self.ask(self.fs.read_link(found.ino)).map(|target| target.to_vec())
    }

    fn link(&mut self, from: &Path, to: &Path) -> Called<()> {
        let source = self.find(from, false)?;
        let Place { parent, name, found } = self.walk(to, false)?;
        match found {
            Some(_) => return Err(libc::EEXIST),
            None if source.kind == FileKind::Directory => return Err(libc::EPERM),
            None => {}
        }
        let made = self.ask(self.fs.link(source.ino, parent, &name))?;
        self.noted(made);
        Ok(())
    }

    fn remove(&mut self, path: &Path) -> Called<()> {
        let Place { parent, name, .. } = self.walk(path, false)?;
        self.ask(self.fs.unlink(parent, &name))
    }

    fn remove_folder(&mut self, path: &Path) -> Called<()> {
        let Place { parent, name, .. } = self.walk(path, false)?;
        self.ask(self.fs.remove_directory(parent, &name))
    }

    fn rename(&mut self, from: &Path, to: &Path, flags: u32) -> Called<()> {
        let (exchange, refuse) = (flags & libc::RENAME_EXCHANGE != 0, flags & libc::RENAME_NOREPLACE != 0);
        if exchange && flags != libc::RENAME_EXCHANGE {
            return Err(libc::EINVAL);
        }
        // Both directories are looked for before both names.
        let is_long = |path: &Path| path.file_name().is_some_and(|name| name.len() > NAME_MAX);
        let (from, to) = match (self.walk(from, false), self.walk(to, false)) {
            (Err(libc::ENAMETOOLONG), Err(errno)) if is_long(from) => return Err(errno),
            (Err(errno), _) => return Err(errno),
            (Ok(Place { found: None, .. }), Err(libc::ENAMETOOLONG)) if is_long(to) => {
                return Err(libc::ENOENT);
            }
            (from, to) => (from?, to?),
        };
        let source = from.found.as_ref().ok_or(libc::ENOENT)?.ino;
        match to.found.as_ref().map(|found| found.ino) {
            Some(_) if refuse => return Err(libc::EEXIST),
            None if exchange => return Err(libc::ENOENT),
            _ if self.is_below(to.parent, source)? => return Err(libc::EINVAL),
            Some(target) if self.is_below(from.parent, target)? => {
                return Err(if exchange { libc::EINVAL } else { libc::ENOTEMPTY });
            }
            Some(target) if target == source => return Ok(()),
            _ => {}
        }
        self.ask(self.fs.rename(CALLER, (from.parent, &from.name), (to.parent, &to.name), flags))
    }

    fn list(&mut self, path: &Path) -> Called<Vec<(Vec<u8>, Kind)>> {
        let found = self.find(path, true)?;
        if found.kind != FileKind::Directory {
            return Err(libc::ENOTDIR);
        }
        let handle = self.fs.open_directory().map_err(|errno| errno.0)?;
        let (mut all, mut offset, mut referenced) = (Vec::new(), 0, Vec::new());
        loop {
            let (before, from) = (all.len(), offset);
            let take = |number, entry: &Listed| {
                let takes = all.len() < before + TAKEN;
                if takes {
                    all.push((entry.name().to_vec(), kind(entry.kind())));
                    offset = number;
                    if let Listed::Name(_, attributes) = entry {
                        referenced.push(attributes.ino);
                    }
                }
                takes
            };
            self.ask(self.fs.read_directory(found.ino, handle, from, true, take))?;
            if all.len() == before {
                break;
            }
        }
        self.references.append(&mut referenced);
        self.fs.release_directory(handle).map_err(|errno| errno.0)?;
        Ok(all)
    }

    fn look(&mut self, path: &Path) -> Called<Status> {
        self.find(path, false).map(|found| status(&found))
    }

    fn set_mode(&mut self, path: &Path, mode: u32) -> Called<()> {
        let found = self.find(path, true)?;
        self.change(found.ino, Change { mode: Some(mode as u16), ..Change::default() })
    }

    fn set_owner(&mut self, path: &Path, uid: Option<u32>, gid: Option<u32>) -> Called<()> {
        let found = self.find(path, false)?;
        self.change(found.ino, Change { uid, gid, ..Change::default() })
    }

    fn set_times(&mut self, path: &Path, accessed: Time, modified: Time) -> Called<()> {
        if accessed == Time::Keep && modified == Time::Keep {
            return Ok(());
        }
        let found = self.find(path, false)?;
        let (atime, mtime) = (time_change(accessed), time_change(modified));
        self.change(found.ino, Change { atime, mtime, ..Change::default() })
    }

    fn set_xattr(&mut self, path: &Path, name: &str, value: &[u8], flags: i32) -> Called<()> {
        let found = self.find(path, false)?;
        Self::check_name(&found, name, libc::EPERM)?;
        // Without entries a list is taken away; flags are for others.
        let (is_list, has_entries) = (is_list(name), value.len() > 4);
        if is_list {
            check_list(&found, name, has_entries)?;
        }
        if is_list && !has_entries {
            return self.remove_list(&found, name);
        }
        let (value, flags) = (Bytes::copy_from_slice(value), if is_list { 0 } else { flags });
        self.ask(self.fs.set_xattr(found.ino, name.as_bytes(), value, flags, None))
    }

    fn xattr(&mut self, path: &Path, name: &str) -> Called<Vec<u8>> {
        let found = self.find(path, false)?;
        Self::check_name(&found, name, libc::ENODATA)?;
        if is_list(name) && found.kind == FileKind::Symlink {
            return Err(libc::EOPNOTSUPP);
        }
        let value = self.ask(self.fs.xattr(found.ino, name.as_bytes(), 64 << 10))?;
        Ok(bytes(value).to_vec())
    }

    fn xattrs(&mut self, path: &Path) -> Called<Vec<String>> {
        let found = self.find(path, false)?;
        let list = bytes(self.ask(self.fs.xattrs(found.ino, 64 << 10))?);
        let names = list.split(|byte| *byte == 0).filter(|name| !name.is_empty());
        Ok(names.map(|name| String::from_utf8_lossy(name).into_owned()).collect())
    }

    fn remove_xattr(&mut self, path: &Path, name: &str) -> Called<()> {
        let found = self.find(path, false)?;
        Self::check_name(&found, name, libc::EPERM)?;
        if is_list(name) { self.remove_list(&found, name) } else { self.remove_attribute(&found, name) }
    }

    /// The reply to STATFS adds these to what the layer counts (`dispatch/reply.rs`).
    fn space(&mut self, path: &Path) -> Called<(u64, u64)> {
        self.find(path, true)?;
        self.ask(self.fs.space()).map(|_| (4096, 255))
    }

    fn map(&mut self, path: &Path, offset: u64, length: usize) -> Called<()> {
        let file = self.open(path, libc::O_RDWR, 0)?;
        let mapped = Mapped { file, offset, length: (length as u64).next_multiple_of(PAGE) };
        self.mapped.replace(mapped).map_or(Ok(()), |before| self.close(before.file))
    }

    fn store(&mut self, at: usize, bytes: &[u8]) -> Called<usize> {
        let mapped = self.mapped.ok_or(libc::EBADF)?;
        let size = self.status(mapped.file)?.size;
        let room = bytes.len().min(mapped.room(at, size));
        if room > 0 {
            self.write(mapped.file, mapped.offset + at as u64, &bytes[..room])?;
        }
        Ok(room)
    }

    fn load(&mut self, at: usize, length: usize) -> Called<Vec<u8>> {
        let mapped = self.mapped.ok_or(libc::EBADF)?;
        let size = self.status(mapped.file)?.size;
        let room = length.min(mapped.room(at, size.next_multiple_of(PAGE)));
        if room == 0 {
            return Err(libc::EFAULT);
        }
        let mut bytes = self.read(mapped.file, mapped.offset + at as u64, room)?;
        // Of the last page.
        bytes.resize(room, 0);
        Ok(bytes)
    }

    /// Nothing waits: what is stored was written.
    fn sync_map(&mut self) -> Called<()> {
        self.mapped.map(drop).ok_or(libc::EBADF)
    }

    fn unmap(&mut self) -> Called<()> {
        self.mapped.take().map_or(Ok(()), |mapped| self.close(mapped.file))
    }

    fn beside(&mut self, operation: &Operation) -> Answer {
        unreachable!("{operation:?} is the kernel's")
    }

    fn rest(&mut self) -> Called<()> {
        Ok(())
    }
}
