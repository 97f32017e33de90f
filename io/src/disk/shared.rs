//! File systems that several hosts may have mounted at once.

use std::path::Path;

/// Their numbers, as statfs(2) gives them, and their names for people. Those of the kernel are in linux/magic.h; those of Lustre
/// (LL_SUPER_MAGIC of lustre_user.h), GPFS, BeeGFS, GFS2 (gfs2_ondisk.h) and PanFS are known to coreutils (stat.c). What lies behind
/// FUSE only the program knows that serves it.
const SHARED: [(u32, &str); 16] = [
    (0x0000_6969, "NFS"),
    (0xff53_4d42, "CIFS"),
    (0xfe53_4d42, "SMB"),
    (0x0000_517b, "SMB"),
    (0x0bd0_0bd0, "Lustre"),
    (0x4750_4653, "GPFS"),
    (0x0102_1997, "9p"),
    (0x00c3_6400, "Ceph"),
    (0x6573_5546, "FUSE"),
    (0x1983_0326, "BeeGFS"),
    (0x5346_414f, "AFS"),
    (0x6b41_4653, "AFS"),
    (0x7375_7245, "Coda"),
    (0x7461_636f, "OCFS2"),
    (0x0116_1970, "GFS2"),
    (0xaad7_aaea, "PanFS"),
];

/// The name of the file system that a path lies on, if several hosts may have that mounted, as those of a network; `None` also
/// where the path cannot be looked at. Blocks.
pub fn shared_file_system(path: &Path) -> Option<&'static str> {
    rustix::fs::statfs(path).ok().and_then(|found| name_of(found.f_type as u32))
}

fn name_of(number: u32) -> Option<&'static str> {
    SHARED.iter().find(|(known, _)| *known == number).map(|(_, name)| *name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_systems_of_networks_are_told_from_those_of_disks() {
        // Of the manual page of statfs(2), where they are written in full.
        let named = [
            (0x6969, "NFS"),
            (0xff534d42, "CIFS"),
            (0xfe534d42, "SMB"),
            (0x517b, "SMB"),
            (0x01021997, "9p"),
            (0x65735546, "FUSE"),
            (0x5346414f, "AFS"),
            (0x73757245, "Coda"),
            (0x7461636f, "OCFS2"),
            (0x00c36400, "Ceph"),
            (0x0bd00bd0, "Lustre"),
            (0x47504653, "GPFS"),
        ];
        for (number, name) in named {
            assert_eq!(name_of(number), Some(name), "{number:#x}");
        }
        // ext4, XFS, Btrfs, F2FS, overlayfs, tmpfs, bcachefs, ZFS.
        for number in
            [0xef53, 0x58465342, 0x9123683e, 0xf2f52010, 0x794c7630, 0x01021994, 0xca451a4e, 0x2fc12fc1]
        {
            assert_eq!(name_of(number), None, "{number:#x}");
        }
    }

    #[test]
    fn what_cannot_be_looked_at_is_none() {
        let folder = tempfile::tempdir().expect("a folder");
        assert_eq!(shared_file_system(&folder.path().join("missing")), None);
        assert_eq!(shared_file_system(Path::new("/proc")), None);
    }
}
