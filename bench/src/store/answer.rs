//! Does what a request asks and writes the answer.

use std::convert::Infallible;
use std::ops::Range;

use bytes::Bytes;
use futures::stream;
use http::header::{
    ACCEPT_RANGES, CACHE_CONTROL, CONTENT_DISPOSITION, CONTENT_ENCODING, CONTENT_LANGUAGE, CONTENT_LENGTH,
    CONTENT_RANGE, CONTENT_TYPE, ETAG, HeaderMap, LAST_MODIFIED,
};
use http::response::Builder;
use http::{Response, StatusCode};
use http_body_util::StreamBody;
use hyper::body::Frame;

use super::fault::Fault;
use super::object::{ByteRange, Object};
use super::objects::{At, Objects};
use super::request::Operation;
use super::xml;

/// An answer's body: slices of stored objects, sent without copying.
pub(super) type Body = StreamBody<stream::Iter<std::vec::IntoIter<Result<Frame<Bytes>, Infallible>>>>;

/// Answers every operation but `Counts`, which the server answers itself.
pub(super) fn answer(
    objects: &Objects,
    operation: Operation,
    headers: &HeaderMap,
    body: Bytes,
) -> Result<Response<Body>, Fault> {
    match operation {
        Operation::Counts => Err(Fault::NotImplemented("counts")),
        Operation::HeadBucket(bucket) => objects.has_bucket(&bucket).map(|()| empty(StatusCode::OK)),
        Operation::CreateBucket(bucket) => {
            objects.create_bucket(&bucket);
            Ok(empty(StatusCode::OK))
        }
        Operation::List(bucket, query) => {
            let page = objects.list(&bucket, &query)?;
            Ok(document(StatusCode::OK, xml::listing(&bucket, &query, &page)))
        }
        Operation::ListUploads(bucket, prefix) => {
            Ok(document(StatusCode::OK, xml::uploads(&bucket, &objects.uploads(&bucket, &prefix)?)))
        }
        Operation::DeleteMany(bucket) => delete_many(objects, bucket, &body),
        Operation::Get(at, conditions, range) => whole_or_part(&*objects.get(&at, &conditions)?, range),
        Operation::Head(at, conditions) => {
            let object = objects.get(&at, &conditions)?;
            Ok(finish(describe(&object).header(CONTENT_LENGTH, object.size), Vec::new()))
        }
        Operation::Put(at, conditions) => {
            let object = objects.put(&at, &conditions, body, kept(headers))?;
            Ok(finish(Response::builder().header(ETAG, &object.etag), Vec::new()))
        }
        Operation::Copy(at, conditions, source, replace) => {
            let headers = replace.then(|| kept(headers));
            let object = objects.copy(&source, &at, &conditions, headers)?;
            Ok(document(StatusCode::OK, xml::copied("CopyObjectResult", &object.etag)))
        }
        Operation::Delete(at, conditions) => {
            objects.delete(&at, &conditions).map(|()| empty(StatusCode::NO_CONTENT))
        }
        Operation::StartUpload(at) => {
            let id = objects.start_upload(&at, kept(headers))?;
            Ok(document(StatusCode::OK, xml::upload_started(&at.bucket, &at.key, &id)))
        }
        Operation::PutPart(at, upload, number) => {
            let etag = objects.put_part(&at, &upload, number, vec![body])?;
            Ok(finish(Response::builder().header(ETAG, etag), Vec::new()))
        }
        Operation::CopyPart(at, upload, number, source) => {
            let etag = objects.copy_part(&source, &at, &upload, number)?;
            Ok(document(StatusCode::OK, xml::copied("CopyPartResult", &etag)))
        }
        Operation::Complete(at, upload, conditions) => {
            let object = objects.complete(&at, &upload, &xml::parts(&body)?, &conditions)?;
            Ok(document(StatusCode::OK, xml::completed(&at.bucket, &at.key, &object)))
        }
        Operation::Abort(at, upload) => objects.abort(&at, &upload).map(|()| empty(StatusCode::NO_CONTENT)),
    }
}

/// A refusal with its XML body.
pub(super) fn refuse(fault: &Fault) -> Response<Body> {
    match fault {
        Fault::NotModified => empty(StatusCode::NOT_MODIFIED),
        fault => document(fault.status(), xml::error(fault)),
    }
}

/// An answer with a body of XML, or of JSON for the counts.
pub(super) fn document(status: StatusCode, text: String) -> Response<Body> {
    let builder = Response::builder().status(status).header(CONTENT_TYPE, "application/xml");
    finish(builder.header(CONTENT_LENGTH, text.len()), vec![Bytes::from(text)])
}

fn empty(status: StatusCode) -> Response<Body> {
    finish(Response::builder().status(status), Vec::new())
}

fn delete_many(objects: &Objects, bucket: String, body: &[u8]) -> Result<Response<Body>, Fault> {
    let keys = xml::keys(body)?;
    for key in &keys {
        objects.delete(&At { bucket: bucket.clone(), key: key.clone() }, &Default::default())?;
    }
    Ok(document(StatusCode::OK, xml::deleted(&keys)))
}

fn whole_or_part(object: &Object, range: Option<ByteRange>) -> Result<Response<Body>, Fault> {
    let builder = describe(object);
    let Some(range) = range else {
        return Ok(finish(builder.header(CONTENT_LENGTH, object.size), object.pieces.clone()));
    };
    let Range { start, end } = range.within(object.size)?;
    let builder = builder
        .status(StatusCode::PARTIAL_CONTENT)
        .header(CONTENT_LENGTH, end - start)
        .header(CONTENT_RANGE, format!("bytes {start}-{}/{}", end - 1, object.size));
    Ok(finish(builder, object.slice(start..end)))
}

fn describe(object: &Object) -> Builder {
    let mut builder = Response::builder()
        .header(ETAG, &object.etag)
        .header(LAST_MODIFIED, httpdate::fmt_http_date(object.modified))
        .header(ACCEPT_RANGES, "bytes");
    for (name, value) in &object.headers {
        builder = builder.header(name, value);
    }
    builder
}

fn finish(builder: Builder, pieces: Vec<Bytes>) -> Response<Body> {
    let frames: Vec<_> = pieces.into_iter().map(|piece| Ok(Frame::data(piece))).collect();
    builder.body(StreamBody::new(stream::iter(frames))).expect("every header above is valid")
}

/// The request's headers that are kept with an object.
fn kept(headers: &HeaderMap) -> HeaderMap {
    let content = [CACHE_CONTROL, CONTENT_DISPOSITION, CONTENT_ENCODING, CONTENT_LANGUAGE, CONTENT_TYPE];
    let keep = |name: &str| name.starts_with("x-amz-meta-") || content.iter().any(|kept| kept == name);
    headers
        .iter()
        .filter(|(name, _)| keep(name.as_str()))
        .map(|(name, value)| (name.clone(), value.clone()))
        .collect()
}
