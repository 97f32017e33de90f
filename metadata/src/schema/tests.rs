//! The bytes of format 1, and that nothing else is read.

use bytes::Bytes;
use forebay_core::{
    Blob, ErrorKind, Extent, FileKind, InodeId, ObjectKey, Result, Source, Timestamp, Version, VolumeId,
};

use super::*;

const KEYS: Keys = Keys(VolumeId(0x0102_0304_0506_0708));

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn blob(key: &str, size: u64) -> Blob {
    Blob { key: ObjectKey::new(key), version: Version::new("v1"), size }
}

#[test]
fn golden_keys() {
    let check = |key: Bytes, expected: &str| assert_eq!(hex(&key), format!("0102030405060708{expected}"));
    let ino = InodeId(0x0a0b);
    check(KEYS.dentry(ino, b"ab"), "440000000000000a0b6162");
    check(KEYS.inode(ino), "490000000000000a0b");
    check(KEYS.extents(ino, 7), "450000000000000a0b00000007");
    check(KEYS.link(ino, InodeId(1), b"n"), "500000000000000a0b00000000000000016e");
    check(KEYS.xattr(ino, b"user.a"), "580000000000000a0b757365722e61");
    check(KEYS.intent(ino), "570000000000000a0b");
    check(KEYS.claim("a/b"), "430da3cfa5f8b7fae9def4d324da969d3a");
    check(KEYS.references("a/b"), "420da3cfa5f8b7fae9def4d324da969d3a");
    check(KEYS.member("a/b", ino), "520da3cfa5f8b7fae9def4d324da969d3a0000000000000a0b");
    check(KEYS.loose("a/b"), "460da3cfa5f8b7fae9def4d324da969d3a");
    check(KEYS.loan(&blob("a/b", 1)), "4ce64cdf0aab62e14e803cc903168c042a");
    check(KEYS.orphan(3, ino), "4f00000000000000030000000000000a0b");
    check(KEYS.trash(3, ino), "5400000000000000030000000000000a0b");
    check(KEYS.session(3), "530000000000000003");
    check(KEYS.known(3), "410000000000000003");
    check(KEYS.upload(3, "a/b"), "5300000000000000030da3cfa5f8b7fae9def4d324da969d3a");
    assert!(KEYS.is_upload(&KEYS.upload(3, "id")) && !KEYS.is_upload(&KEYS.session(3)));
    check(KEYS.deletion(5, "a/b"), "4700000000000000050da3cfa5f8b7fae9def4d324da969d3a");
    check(KEYS.movement(ino), "4a0000000000000a0b");
    check(KEYS.import(ino), "4d0000000000000a0b");
    check(KEYS.quota(ino), "510000000000000a0b");
    check(KEYS.counters(), "4e");
    check(KEYS.loading(), "5a");
    check(KEYS.beneath(&KEYS.inode(ino)), "79490000000000000a0b");
}

#[test]
fn keys_are_taken_apart_and_ranges_hold_just_their_own() {
    let (directory, next) = (InodeId(0xff), InodeId(0x100));
    assert_eq!(KEYS.name_in(&KEYS.dentry(directory, b"n")).expect("name"), "n");
    let link = KEYS.link_in(&KEYS.link(next, directory, b"n")).expect("link");
    assert_eq!(link, (directory, Bytes::from_static(b"n")));
    assert_eq!(KEYS.number_and_ino_in(&KEYS.orphan(9, next)).expect("orphan"), (9, next));
    assert_eq!(KEYS.number_in(&KEYS.intent(next)).expect("number"), 0x100);
    assert_eq!(KEYS.member_in(&KEYS.member("a/b", next)).expect("member"), next);
    let (start, end) = KEYS.members("a/b");
    assert!(KEYS.member("a/b", InodeId(u64::MAX)) < end && KEYS.member("a/b", InodeId(0)) >= start);
    let entry = KEYS.dentry(directory, b"n");
    assert_eq!(KEYS.above(&KEYS.beneath(&entry)), entry);
    assert_eq!(KEYS.tag_in(&KEYS.beneath(&entry)).expect("a tag"), Tag::Beneath);
    assert_eq!(KEYS.extents_in(&KEYS.extents(next, 9)).expect("extents"), (next, 9));
    assert_eq!(KEYS.tag_in(&KEYS.loading()).expect("a tag"), Tag::Loading);
    let unknown = KEYS.tag_in(&[&KEYS.loading()[..8], b"?"].concat().into()).expect_err("no tag");
    assert_eq!(unknown.kind(), ErrorKind::Unsupported);
    let (start, end) = KEYS.below(Tag::Dentry, directory.0);
    let within = |key: Bytes| key >= start && key < end;
    assert!(within(KEYS.dentry(directory, b"\xff\xff")) && within(KEYS.dentry(directory, b"\0")));
    assert!(!within(KEYS.dentry(next, b"a")) && !within(KEYS.inode(directory)));
    let (start, end) = KEYS.family(Tag::Inode);
    assert!(
        KEYS.inode(InodeId(u64::MAX)) < end && KEYS.inode(InodeId(0)) >= start && KEYS.import(next) >= end
    );
    assert_eq!(KEYS.name_in(&KEYS.counters()).expect_err("no name").kind(), ErrorKind::Corrupt);
    assert_eq!(KEYS.number_in(&KEYS.counters()).expect_err("no number").kind(), ErrorKind::Corrupt);
}

fn file() -> Inode {
    let time = |seconds, nanos| Timestamp { seconds, nanos };
    let mut inode = Inode::new(FileKind::File, 0o644, (1000, 100), time(1, 2));
    inode.nlink = 2;
    inode.size = 300;
    inode.mtime = time(-1, 999_999_999);
    inode.generation = 5;
    inode.parent = InodeId(7);
    inode.name = Bytes::from_static(b"f");
    inode.home = Some(blob("d/f", 300));
    let from = |blob: &Blob, offset| Source::Blob { blob: blob.clone(), offset };
    inode.extents = vec![
        Extent { offset: 0, length: 100, source: from(&blob("d/f", 300), 0) },
        Extent { offset: 110, length: 2, source: Source::Inline(Bytes::from_static(b"hi")) },
        Extent { offset: 112, length: 10, source: from(&blob("o", 10), 0) },
    ];
    inode.further = 1;
    inode
}

#[test]
fn golden_values() {
    // Blanks part fields for the reader.
    let check = |value: Bytes, expected: &str| assert_eq!(hex(&value), expected.replace(' ', ""));
    check(Dentry { ino: InodeId(300), kind: FileKind::Symlink }.encode(), "0102ac02");
    check(
        file().encode(),
        "0100a403e8076402 00 ac02 0202 01ff93ebdc03 0202 05 07 0166 \
         01 02 03642f66 027631 ac02 016f 027631 0a \
         03 00 01 64 00 00 0a 00 02 6869 00 01 0a 01 00 01",
    );
    let mut old = Inode::new(FileKind::File, 0o644, (0, 0), Timestamp::default());
    old.note_since(64);
    check(old.encode(), "0100 a403 00 00 01 00 00 0000 0000 0000 00 01 00 00 00 00 00 01 8001");
    let mut directory = Inode::new(FileKind::Directory, 0o755, (0, 0), Timestamp::default());
    directory.run = NumberRun { next: 4, end: 64 };
    directory.kept = true;
    check(directory.encode(), "0101 ed03 00 00 02 00 00 0000 0000 0000 00 01 00 01 04 40");
    directory.packed = true;
    check(directory.encode(), "0101 ed03 00 00 02 00 00 0000 0000 0000 00 01 00 03 04 40");
    let key = ObjectKey::new("k");
    let claim = |state| Claim { key: key.clone(), state }.encode();
    check(claim(HolderState::Held(InodeId(2))), "01016b0002");
    check(claim(HolderState::Intended(InodeId(2))), "01016b0102");
    check(claim(HolderState::Doomed { due_ms: 2 }), "01016b0202");
    check(claim(HolderState::Subtree(InodeId(2))), "01016b0302");
    check(References { key: key.clone(), count: 3 }.encode(), "01016b03");
    check(Member { key: key.clone() }.encode(), "01016b");
    check(Loose { blob: blob("b", 1), changes: 128 }.encode(), "01016202763101 8001");
    let copies = Some(blob("b", 1));
    let intent = Intent { key: key.clone(), replaces: Some(Version::new("v")), copies, mark: None };
    check(intent.encode(), "01016b010176010162027631 01");
    let made = Timestamp { seconds: 1, nanos: 3 };
    let mark = |of| Some(Mark { token: "t".into(), made, of, earlier: Vec::new() });
    let intent = Intent { key: key.clone(), replaces: None, copies: None, mark: mark(None) };
    check(intent.encode(), "01016b00 02017402 03");
    let of = Some(Announced { generation: 4, seals: true });
    let intent = Intent { mark: mark(of), ..intent };
    check(intent.encode(), "01016b00 03017402 030401");
    let earlier = vec![Earlier { token: "u".into(), of: Announced { generation: 3, seals: false } }];
    let intent = Intent { mark: Some(Mark { token: "t".into(), made, of, earlier }), ..intent };
    check(intent.encode(), "01016b00 04017402 030401 01 01750300");
    let intent = Intent { mark: None, ..intent };
    check(intent.encode(), "01016b0000");
    let loan = Loan { blob: blob("b", 1), count: 2, moved: Some(blob("c", 1)) };
    check(loan.encode(), "01016202763101 02 01016302763101");
    check(Deletion { blob: blob("b", 1), session: Some(9) }.encode(), "010162027631010109");
    check(Move::File.encode(), "0100");
    check(Move::Subtree { prefixes: vec!["a/".into()] }.encode(), "01010102612f");
    let state = ImportState { prefix: Some("a".into()), listed: Some(Timestamp { seconds: 1, nanos: 0 }) };
    check(state.encode(), "0101016101 0200");
    check(SessionRecord { started: Timestamp { seconds: 1, nanos: 3 }, is_guest: false }.encode(), "010203");
    check(SessionRecord { started: Timestamp { seconds: 1, nanos: 3 }, is_guest: true }.encode(), "01020301");
    check(Orphan::Open { kept_ms: None }.encode(), "01");
    check(Orphan::Unfinished.encode(), "01 01");
    check(Orphan::Open { kept_ms: Some(128) }.encode(), "01 02 8001");
    check(UploadRecord { key: key.clone(), id: "u".into() }.encode(), "01016b0175");
    check(Counters { next_ino: 2, inodes: 1, bytes: 128 }.encode(), "010201 8001");
    check(quota().encode(), "01 01 8002 00 01 04 01");
    check(Partial::Loading.encode(), "01");
    check(Partial::Adopting { replaced: vec![blob("b", 1)] }.encode(), "01 01 01 016202763101");
    check(encode_plain(b"v"), "0176");
    check(Beneath(None).encode(), "0100");
    check(Beneath(Some(encode_plain(b"v"))).encode(), "0101 020176");
}

fn quota() -> Quota {
    let limits = QuotaLimits { bytes: Some(256), inodes: None };
    Quota { limits, is_counted: true, usage: Usage { inodes: -1, bytes: 2 } }
}

/// What is read back is what was written; cut short anywhere, with a byte too many or with another version it is
/// refused.
fn check_decoding<T: PartialEq + std::fmt::Debug>(
    record: T,
    value: Bytes,
    decode: impl Fn(Bytes) -> Result<T>,
) {
    assert_eq!(decode(value.clone()).expect("whole"), record);
    let refused = |value: Bytes| {
        let error = decode(value.clone()).expect_err("damaged");
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{value:?}");
    };
    for length in 0..value.len() {
        refused(value.slice(..length));
    }
    refused([&value[..], b"\0"].concat().into());
    refused([b"\x02", &value[1..]].concat().into());
}

#[test]
fn only_whole_values_are_read() {
    check_decoding(file(), file().encode(), Inode::decode);
    let mut old = file();
    old.since = Some(1 << 40);
    let value = old.encode();
    assert_eq!(Inode::decode(value.clone()).expect("whole"), old);
    Inode::decode(value.slice(..value.len() - 1)).expect_err("cut short");
    let mut link = Inode::new(FileKind::Symlink, 0o777, (0, 0), Timestamp::default());
    link.target = Bytes::from_static(b"../x");
    check_decoding(link.clone(), link.encode(), Inode::decode);
    let dentry = Dentry { ino: InodeId(u64::MAX), kind: FileKind::Fifo };
    check_decoding(dentry, dentry.encode(), Dentry::decode);
    let of = Some(Announced { generation: u64::MAX, seals: false });
    let earlier = Earlier { token: "u".into(), of: Announced { generation: 1, seals: true } };
    for earlier in [vec![], vec![earlier.clone(), earlier]] {
        let mark = Some(Mark { token: "t".into(), made: Timestamp::default(), of, earlier });
        let intent = Intent { key: ObjectKey::new("k"), replaces: None, copies: None, mark };
        check_decoding(intent.clone(), intent.encode(), Intent::decode);
    }
    let claim = Claim { key: ObjectKey::new("k"), state: HolderState::Doomed { due_ms: u64::MAX } };
    check_decoding(claim.clone(), claim.encode(), Claim::decode);
    let move_ = Move::Subtree { prefixes: vec!["a/".into(), String::new()] };
    check_decoding(move_.clone(), move_.encode(), Move::decode);
    let loan = Loan { blob: blob("b", 1), count: 2, moved: None };
    check_decoding(loan.clone(), loan.encode(), Loan::decode);
    let loose = Loose { blob: blob("b", 1), changes: u64::MAX };
    check_decoding(loose.clone(), loose.encode(), Loose::decode);
    let deletion = Deletion { blob: blob("b", 1), session: None };
    check_decoding(deletion.clone(), deletion.encode(), Deletion::decode);
    for mark in [Partial::Loading, Partial::Adopting { replaced: vec![blob("b", 1), blob("c", 2)] }] {
        assert_eq!(Partial::decode(mark.encode()).expect("whole"), mark);
    }
    for beneath in [Beneath(None), Beneath(Some(encode_plain(b"v")))] {
        check_decoding(beneath.clone(), beneath.encode(), Beneath::decode);
    }
    check_decoding(quota(), quota().encode(), Quota::decode);
    let counters = Counters { next_ino: u64::MAX, inodes: 0, bytes: 1 };
    check_decoding(counters, counters.encode(), Counters::decode);
}

#[test]
fn numbers_and_types_that_do_not_fit_are_refused() {
    for value in ["0109", "0100ffffffffffffffffff02", "0100ffffffffffffffffffff01"] {
        let bytes: Vec<u8> = (0..value.len())
            .step_by(2)
            .map(|at| u8::from_str_radix(&value[at..at + 2], 16).expect("hex"))
            .collect();
        assert_eq!(Dentry::decode(bytes.into()).expect_err(value).kind(), ErrorKind::Corrupt);
    }
}

/// Sizes that no file may have any more can be there: a sum of them ended the mount.
#[test]
fn sums_that_no_number_holds_stay_at_the_largest() {
    let most = Usage { inodes: 1, bytes: i64::MAX };
    assert_eq!(most + most, Usage { inodes: 2, bytes: i64::MAX });
    assert_eq!(-most - most, Usage { inodes: -2, bytes: i64::MIN });
    let least = Usage { inodes: i64::MIN, bytes: i64::MIN };
    assert_eq!(-least, Usage { inodes: i64::MAX, bytes: i64::MAX });
}
