//! How large files may become, and what holes are.

use forebay_core::ErrorKind;
use forebay_io::object::Bucket;

use super::support::{Fixture, READ_WRITE, create, object, open, pattern, run};
use crate::file::LARGEST_BYTES;
use crate::{Position, Seek};

/// Promise S30: What would make a file larger than 16 TiB fails with EFBIG; one that is larger already keeps its size, and
/// can be cut.
#[test]
fn no_file_grows_past_16_tib() {
    run(async {
        let fixture = Fixture::new(Bucket::in_memory());
        let volume = fixture.open().await;
        let (file, other) = (create(&volume, "f").await, create(&volume, "other").await);
        let resize = async |size| volume.set_attributes(file.ino(), Default::default(), Some(size)).await;
        assert_eq!(LARGEST_BYTES, 16 << 40);
        resize(LARGEST_BYTES).await.expect("the largest size");
        const KEEP_SIZE: i32 = 1;
        other.write(0, pattern(1, 0..100)).await.expect("write");
        let refused = [
            resize(LARGEST_BYTES + 1).await.map(drop),
            resize(i64::MAX as u64).await.map(drop),
            file.write(LARGEST_BYTES - 1, pattern(1, 0..2)).await.map(drop),
            file.write(Position::End, pattern(1, 0..1)).await.map(drop),
            file.allocate(0, LARGEST_BYTES, 1).await,
            file.allocate(0, u64::MAX - 1, 1).await,
            file.share(&other, 0..100, LARGEST_BYTES - 99).await.map(drop),
            file.share(&other, 0..100, u64::MAX - 99).await.map(drop),
        ];
        for (number, refused) in refused.into_iter().enumerate() {
            let error = refused.expect_err(&format!("attempt {number} goes past it"));
            assert_eq!(error.kind(), ErrorKind::TooLarge, "attempt {number}: {error}");
        }
        file.allocate(KEEP_SIZE, LARGEST_BYTES, 1).await.expect("that leaves the size");
        file.write(LARGEST_BYTES - 1, pattern(2, 0..1)).await.expect("the last byte");
        file.share(&other, 0..100, LARGEST_BYTES - 100).await.expect("the last bytes");
        assert_eq!(resize(LARGEST_BYTES).await.expect("no change").size, LARGEST_BYTES);
        assert!(file.read(LARGEST_BYTES - 100, 200).await.expect("read") == pattern(1, 0..100));
        for handle in [file, other] {
            handle.release().await.expect("release");
        }
        volume.close().await.expect("close");
    });
}

/// Promise S30: No object has holes: once a file is a plain object, after its last close (S5), what they were is stored as
/// zeros, and counts.
#[test]
fn the_holes_of_a_file_are_zeros_in_its_object() {
    run(async {
        let fixture = Fixture::new(Bucket::in_memory());
        let volume = fixture.open().await;
        let file = create(&volume, "f").await;
        file.write(300_000, pattern(1, 0..100)).await.expect("write");
        file.fsync().await.expect("fsync");
        assert_eq!(file.seek(0, Seek::Data).await.expect("seek"), Some(300_000));
        file.release().await.expect("release");
        volume.close().await.expect("close");
        assert!(object(&fixture.bucket, "f").await == [&vec![0; 300_000][..], &pattern(1, 0..100)].concat());
        let volume = fixture.open().await;
        let file = open(&volume, "f", READ_WRITE).await;
        assert_eq!(file.seek(0, Seek::Data).await.expect("seek"), Some(0));
        file.release().await.expect("release");
        volume.close().await.expect("close");
    });
}
