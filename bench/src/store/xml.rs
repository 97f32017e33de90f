//! The XML bodies of S3, written by hand and read with quick-xml.

use std::fmt::Write;

use serde::Deserialize;

use super::date;
use super::fault::Fault;
use super::listing::{ListQuery, Page};
use super::object::Object;

const HEAD: &str = r#"<?xml version="1.0" encoding="UTF-8"?>"#;
const NAMESPACE: &str = r#"xmlns="http://s3.amazonaws.com/doc/2006-03-01/""#;

pub(super) fn error(fault: &Fault) -> String {
    format!("{HEAD}<Error><Code>{}</Code><Message>{}</Message></Error>", fault.code(), fault.message())
}

pub(super) fn listing(bucket: &str, query: &ListQuery, page: &Page) -> String {
    let mut out = format!(
        "{HEAD}<ListBucketResult {NAMESPACE}><Name>{}</Name><Prefix>{}</Prefix><Delimiter>{}</Delimiter>\
         <MaxKeys>{}</MaxKeys><KeyCount>{}</KeyCount><IsTruncated>{}</IsTruncated>",
        escape(bucket),
        escape(&query.prefix),
        escape(&query.delimiter),
        query.limit,
        page.objects.len() + page.prefixes.len(),
        page.next.is_some(),
    );
    if let Some(next) = &page.next {
        push(&mut out, "NextContinuationToken", next);
    }
    for (key, object) in &page.objects {
        out.push_str("<Contents>");
        push(&mut out, "Key", key);
        push(&mut out, "LastModified", &date::iso(object.modified));
        push(&mut out, "ETag", &object.etag);
        push(&mut out, "Size", &object.size.to_string());
        out.push_str("<StorageClass>STANDARD</StorageClass></Contents>");
    }
    for prefix in &page.prefixes {
        out.push_str("<CommonPrefixes>");
        push(&mut out, "Prefix", prefix);
        out.push_str("</CommonPrefixes>");
    }
    out.push_str("</ListBucketResult>");
    out
}

pub(super) fn uploads(bucket: &str, uploads: &[(String, String)]) -> String {
    let mut out =
        format!("{HEAD}<ListMultipartUploadsResult {NAMESPACE}><Bucket>{}</Bucket>", escape(bucket));
    out.push_str("<IsTruncated>false</IsTruncated>");
    for (key, id) in uploads {
        out.push_str("<Upload>");
        push(&mut out, "Key", key);
        push(&mut out, "UploadId", id);
        push(&mut out, "Initiated", &date::iso(std::time::SystemTime::now()));
        out.push_str("</Upload>");
    }
    out.push_str("</ListMultipartUploadsResult>");
    out
}

pub(super) fn upload_started(bucket: &str, key: &str, id: &str) -> String {
    let mut out = format!("{HEAD}<InitiateMultipartUploadResult {NAMESPACE}>");
    push(&mut out, "Bucket", bucket);
    push(&mut out, "Key", key);
    push(&mut out, "UploadId", id);
    out.push_str("</InitiateMultipartUploadResult>");
    out
}

pub(super) fn completed(bucket: &str, key: &str, object: &Object) -> String {
    let mut out = format!("{HEAD}<CompleteMultipartUploadResult {NAMESPACE}>");
    push(&mut out, "Bucket", bucket);
    push(&mut out, "Key", key);
    push(&mut out, "ETag", &object.etag);
    out.push_str("</CompleteMultipartUploadResult>");
    out
}

/// The answer to a copy (`CopyObjectResult`) or a part copy (`CopyPartResult`).
pub(super) fn copied(name: &str, etag: &str) -> String {
    let mut out = format!("{HEAD}<{name} {NAMESPACE}>");
    push(&mut out, "LastModified", &date::iso(std::time::SystemTime::now()));
    push(&mut out, "ETag", etag);
    let _ = write!(out, "</{name}>");
    out
}

pub(super) fn deleted(keys: &[String]) -> String {
    let mut out = format!("{HEAD}<DeleteResult {NAMESPACE}>");
    for key in keys {
        out.push_str("<Deleted>");
        push(&mut out, "Key", key);
        out.push_str("</Deleted>");
    }
    out.push_str("</DeleteResult>");
    out
}

/// The (number, ETag) pairs of a CompleteMultipartUpload.
pub(super) fn parts(body: &[u8]) -> Result<Vec<(u32, String)>, Fault> {
    #[derive(Deserialize)]
    struct Complete {
        #[serde(rename = "Part", default)]
        parts: Vec<Part>,
    }
    #[derive(Deserialize)]
    struct Part {
        #[serde(rename = "PartNumber")]
        number: u32,
        #[serde(rename = "ETag")]
        etag: String,
    }
    let complete: Complete = read(body)?;
    Ok(complete.parts.into_iter().map(|part| (part.number, part.etag)).collect())
}

/// The keys of a DeleteObjects.
pub(super) fn keys(body: &[u8]) -> Result<Vec<String>, Fault> {
    #[derive(Deserialize)]
    struct Delete {
        #[serde(rename = "Object", default)]
        objects: Vec<Named>,
    }
    #[derive(Deserialize)]
    struct Named {
        #[serde(rename = "Key")]
        key: String,
    }
    let delete: Delete = read(body)?;
    Ok(delete.objects.into_iter().map(|object| object.key).collect())
}

fn read<T: for<'a> Deserialize<'a>>(body: &[u8]) -> Result<T, Fault> {
    quick_xml::de::from_reader(body).map_err(|_| Fault::MalformedXml)
}

fn push(out: &mut String, name: &str, text: &str) {
    let _ = write!(out, "<{name}>{}</{name}>", escape(text));
}

fn escape(text: &str) -> std::borrow::Cow<'_, str> {
    quick_xml::escape::escape(text)
}
