//! The XML of the S3 requests that are sent from here.
//!
//! Formats: <https://docs.aws.amazon.com/AmazonS3/latest/API/>, ListObjectsV2, ListMultipartUploads, ListParts,
//! UploadPartCopy, DeleteObjects and CompleteMultipartUpload. Keys that were asked for URL-encoded have a space as a plus sign.

use chrono::{DateTime, Utc};
use forebay_core::{Timestamp, Version};
use object_store::multipart::PartId;
use object_store::path::Path;
use object_store::{ObjectMeta, Result};
use percent_encoding::percent_decode_str;
use quick_xml::escape::escape;
use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::object::error::STORE;
use crate::object::key::{address, is_segment};
use crate::object::request::Page;

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct ListBucketResult {
    #[serde(default)]
    contents: Vec<Contents>,
    #[serde(default)]
    common_prefixes: Vec<CommonPrefix>,
    #[serde(default)]
    encoding_type: Option<String>,
    #[serde(default)]
    is_truncated: bool,
    #[serde(default)]
    next_continuation_token: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Contents {
    key: String,
    last_modified: DateTime<Utc>,
    #[serde(rename = "ETag")]
    e_tag: Option<String>,
    size: u64,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct CommonPrefix {
    prefix: String,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct ListMultipartUploadsResult {
    #[serde(default)]
    upload: Vec<UploadEntry>,
    #[serde(default)]
    encoding_type: Option<String>,
    #[serde(default)]
    is_truncated: bool,
    #[serde(default)]
    next_key_marker: Option<String>,
    #[serde(default)]
    next_upload_id_marker: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct UploadEntry {
    key: String,
    upload_id: String,
    #[serde(default)]
    initiated: Option<DateTime<Utc>>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct ListPartsResult {
    #[serde(default)]
    part: Vec<Part>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Part {
    #[serde(rename = "PartNumber")]
    _number: u32,
}

#[derive(Debug, Deserialize)]
struct DeleteResult {
    #[serde(rename = "Error", default)]
    errors: Vec<DeleteError>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct DeleteError {
    key: String,
    code: String,
    message: String,
}

#[derive(Debug, Deserialize)]
struct Tagged {
    #[serde(rename = "ETag")]
    e_tag: String,
}

#[derive(Debug, Deserialize)]
struct CopiedPart {
    #[serde(rename = "ETag")]
    e_tag: String,
    #[serde(rename = "ChecksumSHA256")]
    checksum_sha256: Option<String>,
    #[serde(rename = "ChecksumCRC64NVME")]
    checksum_crc64nvme: Option<String>,
}

/// What a part is known by, as object_store puts it into its number where the bucket is asked to check checksums
/// (`AWS_CHECKSUM_ALGORITHM`); without, it is the ETag alone.
#[derive(Debug, Deserialize)]
struct PartNames {
    e_tag: String,
    checksum_sha256: Option<String>,
    checksum_crc64nvme: Option<String>,
}

impl PartNames {
    fn read(content_id: &str) -> Self {
        let plain = || Self { e_tag: content_id.to_owned(), checksum_sha256: None, checksum_crc64nvme: None };
        if content_id.starts_with('<') {
            quick_xml::de::from_str(content_id).unwrap_or_else(|_| plain())
        } else {
            plain()
        }
    }

    /// As `read` reads it.
    fn to_text(&self) -> String {
        let mut text = format!("<PartMetadata><e_tag>{}</e_tag>", escape(self.e_tag.as_str()));
        let fields =
            [("checksum_sha256", &self.checksum_sha256), ("checksum_crc64nvme", &self.checksum_crc64nvme)];
        for (name, checksum) in fields.iter().filter_map(|(name, value)| Some((name, value.as_deref()?))) {
            text.push_str(&format!("<{name}>{}</{name}>", escape(checksum)));
        }
        text + "</PartMetadata>"
    }

    fn checksums(&self) -> impl Iterator<Item = (&'static str, &String)> {
        let all =
            [("ChecksumSHA256", &self.checksum_sha256), ("ChecksumCRC64NVME", &self.checksum_crc64nvme)];
        all.into_iter().filter_map(|(name, value)| Some((name, value.as_ref()?)))
    }

    fn has_checksum(&self) -> bool {
        self.checksums().next().is_some()
    }
}

/// Unfinished uploads as the store names them, and the marker of the next page.
pub(super) struct ListedUploads {
    pub(super) uploads: Vec<(String, String, Timestamp)>,
    pub(super) next: Option<(String, String)>,
}

/// Reads one page of keys below `prefix`.
pub(in crate::object::backend) fn read_page(body: &[u8], prefix: &str) -> Result<Page> {
    let answer: ListBucketResult = parse(body)?;
    let decoded = answer.encoding_type.is_some();
    let next = answer.next_continuation_token.filter(|token| !token.is_empty());
    if answer.is_truncated && next.is_none() {
        return Err(no_way_on("keys"));
    }
    let mut page = Page { next, ..Page::default() };
    for object in answer.contents {
        let key = decode(object.key, decoded);
        let Some(location) = key.as_deref().and_then(address) else {
            // The marker of a directory stands for the directory, which its listing shows already. One that has bytes is
            // somebody's data.
            if key.as_deref() == Some(prefix) && object.size == 0 {
                // Markers are empty, and all that is empty has one ETag.
                let e_tag = object.e_tag.unwrap_or_default();
                page.marker = Some(Version::new(format!("{e_tag} {}", object.last_modified.to_rfc3339())));
            }
            if key.as_deref().is_none_or(|key| key.trim_end_matches('/').len() + 1 != key.len()) {
                page.skipped.note(key);
            }
            continue;
        };
        page.objects.push(ObjectMeta {
            location,
            last_modified: object.last_modified,
            size: object.size,
            e_tag: object.e_tag,
            version: None,
        });
    }
    for entry in answer.common_prefixes {
        let key = decode(entry.prefix, decoded);
        let name =
            key.as_deref().and_then(|key| key.strip_prefix(prefix)).and_then(|key| key.strip_suffix('/'));
        match name.filter(|name| is_segment(name)) {
            Some(name) => page.directories.push(name.to_owned()),
            None => page.skipped.note(key),
        }
    }
    Ok(page)
}

/// Reads one page of unfinished uploads.
pub(super) fn read_uploads(body: &[u8]) -> Result<ListedUploads> {
    let answer: ListMultipartUploadsResult = parse(body)?;
    let decoded = answer.encoding_type.is_some();
    let entry = |upload: UploadEntry| {
        // One of which the store does not tell when it was begun is never taken for an old one.
        let at = upload.initiated.unwrap_or(DateTime::<Utc>::MAX_UTC);
        let started = Timestamp { seconds: at.timestamp(), nanos: at.timestamp_subsec_nanos() };
        Some((decode(upload.key, decoded)?, upload.upload_id, started))
    };
    let next = match (answer.is_truncated, answer.next_key_marker, answer.next_upload_id_marker) {
        (false, ..) => None,
        (true, Some(key), Some(id)) => Some((decode(key, decoded).ok_or_else(|| no_way_on("uploads"))?, id)),
        (true, ..) => return Err(no_way_on("uploads")),
    };
    Ok(ListedUploads { uploads: answer.upload.into_iter().filter_map(entry).collect(), next })
}

/// A page that is not the last one, and does not say where the next begins: what follows would seem not to be there.
fn no_way_on(of: &str) -> object_store::Error {
    let source = format!("the store says that there are more {of}, and not where they begin").into();
    object_store::Error::Generic { store: STORE, source }
}

/// Reads whether an upload has parts.
pub(super) fn read_has_parts(body: &[u8]) -> Result<bool> {
    parse::<ListPartsResult>(body).map(|answer| !answer.part.is_empty())
}

/// Reads what a copied part is known by when its upload is completed, as object_store says it of one that was sent.
pub(super) fn read_copied_part(body: &[u8]) -> Result<String> {
    let part: CopiedPart = parse(body)?;
    let named = PartNames {
        e_tag: part.e_tag,
        checksum_sha256: part.checksum_sha256,
        checksum_crc64nvme: part.checksum_crc64nvme,
    };
    Ok(if named.has_checksum() { named.to_text() } else { named.e_tag })
}

/// Reads the ETag of a completed upload, or of a copy.
pub(in crate::object::backend) fn read_completed(body: &[u8]) -> Result<String> {
    parse::<Tagged>(body).map(|object| object.e_tag)
}

/// Writes the list of parts that an upload is completed with.
pub(in crate::object::backend) fn write_parts(parts: &[PartId]) -> String {
    let mut text =
        String::from("<CompleteMultipartUpload xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">");
    for (index, part) in parts.iter().enumerate() {
        let (number, named) = (index + 1, PartNames::read(&part.content_id));
        let tag = escape(named.e_tag.as_str());
        text.push_str(&format!("<Part><PartNumber>{number}</PartNumber><ETag>{tag}</ETag>"));
        for (name, checksum) in named.checksums() {
            let checksum = escape(checksum.as_str());
            text.push_str(&format!("<{name}>{checksum}</{name}>"));
        }
        text.push_str("</Part>");
    }
    text.push_str("</CompleteMultipartUpload>");
    text
}

/// Writes which objects are to be deleted, and that only what stays is to be told.
pub(super) fn write_deleted(keys: &[Path]) -> String {
    let mut text =
        String::from("<Delete xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\"><Quiet>true</Quiet>");
    for key in keys {
        text.push_str(&format!("<Object><Key>{}</Key></Object>", escape(key.as_ref())));
    }
    text.push_str("</Delete>");
    text
}

/// Reads why an object was not deleted, code and message, where any was not: one is enough, as all are asked for again. What
/// was gone already is deleted. An error about a key that nobody asked for counts as well: whatever it means, it is not that
/// everything went.
pub(super) fn read_deleted(body: &[u8]) -> Result<Option<(String, String)>> {
    const ROOT: &[u8] = b"<DeleteResult";
    // Some say nothing at all where nothing stays.
    if body.trim_ascii().is_empty() {
        return Ok(None);
    }
    let answer: DeleteResult = parse(body)?;
    // Whatever else somebody on the way may say, it is not that all is deleted.
    if !body.windows(ROOT.len()).any(|window| window == ROOT) {
        return Err(object_store::Error::Generic { store: STORE, source: "no answer to a deletion".into() });
    }
    let failed = answer.errors.into_iter().find(|error| error.code != "NoSuchKey");
    Ok(failed.map(|DeleteError { key, code, message }| (code, format!("{key}: {message}"))))
}

fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T> {
    let bad = |source: Box<dyn std::error::Error + Send + Sync>| object_store::Error::Generic {
        store: STORE,
        source: format!("the store sent XML that cannot be read: {source}").into(),
    };
    let text = std::str::from_utf8(body).map_err(|error| bad(error.into()))?;
    // Long operations send spaces to keep the connection open before the answer starts.
    quick_xml::de::from_str(text.trim_start()).map_err(|error| bad(error.into()))
}

/// The key itself, or `None` when it is not UTF-8.
fn decode(text: String, encoded: bool) -> Option<String> {
    if !encoded {
        return Some(text);
    }
    let spaced = text.replace('+', " ");
    percent_decode_str(&spaced).decode_utf8().ok().map(|key| key.into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = "  <?xml version=\"1.0\"?><ListBucketResult><EncodingType>url</EncodingType>\
        <NextContinuationToken>more</NextContinuationToken>\
        <Contents><Key>d/a+b%25%2B</Key><LastModified>2024-05-01T10:00:00.000Z</LastModified>\
        <ETag>&quot;x&quot;</ETag><Size>7</Size></Contents>\
        <Contents><Key>d/</Key><LastModified>2024-05-01T10:00:00Z</LastModified><Size>0</Size></Contents>\
        <Contents><Key>d//a</Key><LastModified>2024-05-01T10:00:00Z</LastModified><Size>0</Size></Contents>\
        <Contents><Key>d/%FF</Key><LastModified>2024-05-01T10:00:00Z</LastModified><Size>0</Size></Contents>\
        <CommonPrefixes><Prefix>d/sub+dir/</Prefix></CommonPrefixes>\
        <CommonPrefixes><Prefix>d//</Prefix></CommonPrefixes></ListBucketResult>";

    #[test]
    fn a_page_keeps_what_has_an_address_and_counts_the_rest() {
        let page = read_page(PAGE.as_bytes(), "d/").expect("page");
        let keys: Vec<_> = page.objects.iter().map(|meta| meta.location.as_ref()).collect();
        assert_eq!(keys, ["d/a b%+"]);
        assert_eq!(page.objects[0].e_tag.as_deref(), Some("\"x\""));
        assert_eq!(page.directories, ["sub dir"]);
        assert_eq!((page.skipped.keys, page.next.as_deref()), (3, Some("more")));
    }

    /// Somebody's bytes under a directory's own key were taken for its marker, and deleted with the directory.
    #[test]
    fn a_marker_is_empty() {
        let marker = |bytes: u64| {
            let object =
                format!("<Key>d/</Key><LastModified>2024-05-01T10:00:00Z</LastModified><Size>{bytes}</Size>");
            let text = format!("<ListBucketResult><Contents>{object}</Contents></ListBucketResult>");
            read_page(text.as_bytes(), "d/").expect("page").marker
        };
        assert!(marker(0).is_some() && marker(7).is_none());
    }

    /// A page that says that there is more, and not where, was taken for the last one.
    #[test]
    fn a_page_that_cannot_be_gone_on_from_is_no_end() {
        let uploads = |rest: &str| {
            let text = format!("<ListMultipartUploadsResult>{rest}</ListMultipartUploadsResult>");
            read_uploads(text.as_bytes()).map(|page| page.next)
        };
        let next = "<NextKeyMarker>a</NextKeyMarker><NextUploadIdMarker>1</NextUploadIdMarker>";
        let more = "<IsTruncated>true</IsTruncated>";
        assert_eq!(uploads("<IsTruncated>false</IsTruncated>").expect("the last page"), None);
        let read = uploads(&format!("{more}{next}")).expect("one more");
        assert_eq!(read, Some(("a".to_owned(), "1".to_owned())));
        uploads(more).expect_err("no markers");
        uploads(&format!("{more}<EncodingType>url</EncodingType>{}", next.replace(">a<", ">%FF<")))
            .expect_err("no key");
        let keys = |rest: &str| {
            let text = format!("<ListBucketResult>{rest}</ListBucketResult>");
            read_page(text.as_bytes(), "").map(|page| page.next)
        };
        assert_eq!(keys("<IsTruncated>false</IsTruncated>").expect("the last page"), None);
        keys(more).expect_err("no token");
    }

    #[test]
    fn what_is_to_be_deleted_is_escaped_and_what_stays_is_told() {
        let keys = ["a<b>&c", "x/SlowDown.txt"].map(Path::from);
        let text = write_deleted(&keys);
        assert!(text.contains("<Quiet>true</Quiet>"), "{text}");
        for key in keys {
            let written = format!("<Key>{}</Key>", escape(key.as_ref()));
            assert!(text.contains(&written), "{text}");
        }
        let read = |inside: &str| {
            let text = format!("<?xml version=\"1.0\"?>\n<DeleteResult xmlns=\"x\">{inside}</DeleteResult>");
            read_deleted(text.as_bytes()).expect("an answer")
        };
        let error = |key: &str, code: &str| {
            format!("<Error><Key>{key}</Key><Code>{code}</Code><Message>why</Message></Error>")
        };
        assert_eq!(read(""), None);
        for nothing in [&b"\n"[..], b"<?xml version=\"1.0\"?><DeleteResult xmlns=\"x\"/>"] {
            assert_eq!(read_deleted(nothing).expect("an answer"), None);
        }
        for other in [&b"<html><body>Welcome</body></html>"[..], b"deleted"] {
            read_deleted(other).expect_err("no answer to it");
        }
        assert_eq!(read("<Deleted><Key>InternalError</Key></Deleted>"), None);
        assert_eq!(read(&error("a", "NoSuchKey")), None);
        let both = [error("a", "NoSuchKey"), error("b", "AccessDenied")].concat();
        assert_eq!(read(&both), Some(("AccessDenied".to_owned(), "b: why".to_owned())));
    }

    #[test]
    fn parts_are_numbered_from_one_and_escaped() {
        let parts = ["\"a\"", "b"].map(|tag| PartId { content_id: tag.into() });
        let text = write_parts(&parts);
        assert!(text.contains("<PartNumber>1</PartNumber><ETag>&quot;a&quot;</ETag>"), "{text}");
        assert!(text.contains("<PartNumber>2</PartNumber><ETag>b</ETag>"), "{text}");
    }

    /// The whole of what object_store says of a part was taken for its ETag: no upload in parts could be completed.
    #[test]
    fn parts_keep_the_checksums_that_they_were_stored_with() {
        let sent = "<PartMetadata><e_tag>\"a\"</e_tag><checksum_sha256>s+/=</checksum_sha256></PartMetadata>";
        let copied = "<CopyPartResult><LastModified>2026-11-24T00:00:00Z</LastModified><ETag>&quot;b&quot;</ETag>\
            <ChecksumCRC64NVME>c=</ChecksumCRC64NVME></CopyPartResult>";
        let copied = read_copied_part(copied.as_bytes()).expect("read");
        let parts = [sent.to_owned(), copied].map(|content_id| PartId { content_id });
        let text = write_parts(&parts);
        for part in [
            "<PartNumber>1</PartNumber><ETag>&quot;a&quot;</ETag><ChecksumSHA256>s+/=</ChecksumSHA256></Part>",
            "<PartNumber>2</PartNumber><ETag>&quot;b&quot;</ETag><ChecksumCRC64NVME>c=</ChecksumCRC64NVME></Part>",
        ] {
            assert!(text.contains(part), "{text}");
        }
        let plain = "<CopyPartResult><ETag>\"b\"</ETag></CopyPartResult>";
        assert_eq!(read_copied_part(plain.as_bytes()).expect("read"), "\"b\"");
    }
}
