//! Uploads in parts, and in parts of one size.

use forebay_core::units::{GIB, TIB};

use super::sizes::LARGEST_PART_BYTES;
use super::*;
use crate::object::OperationKind;

#[test]
fn all_parts_together_hold_16_tib() {
    let total: u64 = (0..MAX_PARTS).map(part_size).sum();
    assert!(total >= 16 << 40, "{total} bytes");
    assert_eq!(part_size(0), 8 * MIB);
    assert!((0..MAX_PARTS).all(|index| (MIN_PART_BYTES..=5 << 30).contains(&part_size(index))));
    assert!((1..MAX_PARTS).all(|index| part_size(index) >= part_size(index - 1)));
}

#[test]
fn even_parts_are_enough_for_any_length() {
    assert_eq!((even_part_size(None), even_part_size(Some(70 * GIB))), (8 * MIB, 8 * MIB));
    for length in [100 * GIB, TIB, 16 * TIB] {
        let part = even_part_size(Some(length));
        assert!(length.div_ceil(part) <= MAX_PARTS as u64 && part < LARGEST_PART_BYTES, "{length}: {part}");
    }
}

fn pattern(bytes: u64) -> Bytes {
    (0..bytes).map(|at| (at % 251) as u8 ^ (at >> 20) as u8).collect::<Vec<_>>().into()
}

/// Writes an object as memory is short in its midst, with a copy in it, and completes it.
async fn write_unevenly(bucket: &Bucket, key: &ObjectKey) -> Result<Bytes> {
    let data = pattern(30 * MIB);
    let source = ObjectKey::new("source");
    let from = bucket.put(&source, data.clone(), Condition::Always).await?;
    let mut upload = bucket.upload(key).await?;
    upload.write(data.slice(..6 << 20)).await?;
    let kept = upload.relieve().await?;
    assert!(kept < bucket.least_part_bytes(), "{kept}");
    upload.write(data.slice(6 << 20..13 << 20)).await?;
    upload.relieve().await?;
    upload.copy_from(&source, &from.version, 13 * MIB..29 * MIB).await?;
    upload.write(data.slice(29 << 20..)).await?;
    upload.complete(Condition::IfAbsent).await?;
    Ok(data)
}

/// On Cloudflare R2 a file of which parts were sent early, or copied, failed at its end, each time that it was sent.
#[tokio::test]
async fn a_store_that_wants_parts_alike_gets_them_from_its_first_refusal_on() {
    let bucket = Bucket::in_memory_of_even_parts();
    let key = ObjectKey::new("a");
    let refused = write_unevenly(&bucket, &key).await.expect_err("parts of several sizes");
    assert_eq!(refused.kind(), ErrorKind::Unavailable, "another try may do: {refused}");
    assert!(refused.hint().is_some_and(|hint| hint.contains("even_parts")), "{refused}");
    assert!(bucket.wants_even_parts() && bucket.apart().wants_even_parts());
    assert!(!bucket.probe().await.expect("probe").unequal_parts);
    let data = write_unevenly(&bucket, &key).await.expect("parts of one size");
    assert_eq!(bucket.get_whole(&key).await.expect("get").0, data);
    assert_eq!(bucket.list_uploads("").await.expect("uploads"), [], "the refused one was aborted");
}

/// What is refused though its parts are alike is refused for good.
#[tokio::test]
async fn parts_that_are_alike_and_refused_are_no_reason_to_try_again() {
    let bucket = Bucket::in_memory_of_even_parts();
    let options = UploadOptions { part_bytes: Some(4), ..UploadOptions::default() };
    let mut upload = bucket.upload_with(&ObjectKey::new("a"), options).expect("upload");
    for piece in ["1234", "5678", "9"] {
        upload.write(piece.into()).await.expect("write");
    }
    assert!(!upload.state().is_uneven());
    let error = object_store::Error::from(super::super::error::Fault::Service {
        status: 400,
        code: "InvalidPart".into(),
        message: "gone".into(),
    });
    assert_eq!(upload.state().not_completed(error).kind(), ErrorKind::Refused);
    assert!(!bucket.wants_even_parts());
    upload.abort().await.expect("abort");
}

#[tokio::test]
async fn a_whole_object_is_copied_evenly_without_a_byte_through_this_host() {
    let bucket = Bucket::in_memory_of_even_parts();
    bucket.want_even_parts();
    let (from, to) = (ObjectKey::new("from"), ObjectKey::new("to"));
    let size = 21 * MIB + 1;
    let source = bucket.put(&from, pattern(size), Condition::Always).await.expect("put");
    for (options, copies) in [
        (UploadOptions { length: Some(size), ..UploadOptions::default() }, 1),
        // Two halves, of which the second ends the object.
        (UploadOptions { length: Some(size), part_bytes: Some(7 * MIB), ..UploadOptions::default() }, 4),
    ] {
        let before = bucket.counters();
        let mut upload = bucket.upload_with(&to, options).expect("upload");
        let ends = if copies == 1 { vec![size] } else { vec![14 * MIB, size] };
        for (at, end) in std::iter::once(0).chain(ends.clone()).zip(ends) {
            upload.copy_from(&from, &source.version, at..end).await.expect("copy");
        }
        upload.complete(Condition::Always).await.expect("complete");
        let asked = bucket.counters().since(&before);
        assert_eq!(asked.of(OperationKind::CopyPart).requests, copies);
        assert_eq!((asked.of(OperationKind::Get).requests, asked.of(OperationKind::Part).requests), (0, 0));
        assert_eq!(bucket.get_whole(&to).await.expect("get").0, pattern(size));
    }
}
