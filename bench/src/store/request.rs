//! What an HTTP request asks for, in S3's terms.

use http::header::{HeaderMap, HeaderName, IF_MATCH, IF_NONE_MATCH, RANGE};
use http::{Method, Uri};

use super::fault::Fault;
use super::listing::ListQuery;
use super::object::{ByteRange, Conditions};
use super::objects::{At, Source};

/// Most entries on a page of a listing, as in S3.
const PAGE: usize = 1000;

/// A request, without its body.
#[derive(Debug, Clone)]
pub(super) enum Operation {
    Counts,
    HeadBucket(String),
    CreateBucket(String),
    List(String, ListQuery),
    ListUploads(String, String),
    DeleteMany(String),
    Get(At, Conditions, Option<ByteRange>),
    Head(At, Conditions),
    Put(At, Conditions),
    Copy(At, Conditions, Source, bool),
    Delete(At, Conditions),
    StartUpload(At),
    PutPart(At, Upload, u32),
    CopyPart(At, Upload, u32, Source),
    Complete(At, Upload, Conditions),
    Abort(At, Upload),
}

/// An upload id.
pub(super) type Upload = String;

impl Operation {
    /// Reads method, path, query and headers.
    pub(super) fn parse(method: &Method, uri: &Uri, headers: &HeaderMap) -> Result<Self, Fault> {
        let query = Query::parse(uri.query().unwrap_or_default());
        let path = decode(uri.path().trim_start_matches('/'))?;
        let (bucket, key) = path.split_once('/').unwrap_or((&path, ""));
        if bucket == "-" {
            return Ok(Self::Counts);
        }
        match key {
            "" => of_bucket(method, bucket.to_owned(), &query),
            key => of_object(method, At { bucket: bucket.into(), key: key.into() }, &query, headers),
        }
    }
}

fn of_bucket(method: &Method, bucket: String, query: &Query) -> Result<Operation, Fault> {
    Ok(match *method {
        Method::HEAD => Operation::HeadBucket(bucket),
        Method::PUT => Operation::CreateBucket(bucket),
        Method::POST if query.has("delete") => Operation::DeleteMany(bucket),
        Method::GET if query.has("uploads") => Operation::ListUploads(bucket, query.text("prefix")),
        Method::GET if query.get("list-type") == Some("2") => {
            let limit = match query.get("max-keys") {
                Some(text) => text.parse::<usize>().map_err(|_| Fault::InvalidArgument("max-keys"))?,
                None => PAGE,
            };
            let list = ListQuery {
                prefix: query.text("prefix"),
                delimiter: query.text("delimiter"),
                start_after: query.text("start-after"),
                token: query.get("continuation-token").map(str::to_owned),
                limit: limit.clamp(1, PAGE),
            };
            Operation::List(bucket, list)
        }
        _ => return Err(Fault::NotImplemented("this request on a bucket")),
    })
}

fn of_object(method: &Method, at: At, query: &Query, headers: &HeaderMap) -> Result<Operation, Fault> {
    let conditions = conditions(headers, &IF_MATCH, &IF_NONE_MATCH);
    let upload = query.get("uploadId").map(str::to_owned);
    let source = source(headers)?;
    Ok(match (method.clone(), upload, source) {
        (Method::GET, None, _) => {
            let range = text(headers, &RANGE).and_then(|range| ByteRange::parse(&range));
            Operation::Get(at, conditions, range)
        }
        (Method::HEAD, None, _) => Operation::Head(at, conditions),
        (Method::PUT, Some(upload), source) => {
            let number = query.get("partNumber").and_then(|text| text.parse().ok());
            let number = number.filter(|number| (1..=10_000).contains(number));
            let number = number.ok_or(Fault::InvalidArgument("partNumber"))?;
            match source {
                Some(source) => Operation::CopyPart(at, upload, number, source),
                None => Operation::PutPart(at, upload, number),
            }
        }
        (Method::PUT, None, Some(source)) => {
            let directive = text(headers, &HeaderName::from_static("x-amz-metadata-directive"));
            Operation::Copy(at, conditions, source, directive.as_deref() == Some("REPLACE"))
        }
        (Method::PUT, None, None) => Operation::Put(at, conditions),
        (Method::DELETE, Some(upload), _) => Operation::Abort(at, upload),
        (Method::DELETE, None, _) => Operation::Delete(at, conditions),
        (Method::POST, Some(upload), _) => Operation::Complete(at, upload, conditions),
        (Method::POST, None, _) if query.has("uploads") => Operation::StartUpload(at),
        _ => return Err(Fault::NotImplemented("this request on an object")),
    })
}

/// The object that `x-amz-copy-source` names.
fn source(headers: &HeaderMap) -> Result<Option<Source>, Fault> {
    let Some(path) = text(headers, &HeaderName::from_static("x-amz-copy-source")) else { return Ok(None) };
    let path = decode(path.trim_start_matches('/'))?;
    let (bucket, key) = path.split_once('/').ok_or(Fault::InvalidArgument("x-amz-copy-source"))?;
    let conditions = conditions(
        headers,
        &HeaderName::from_static("x-amz-copy-source-if-match"),
        &HeaderName::from_static("x-amz-copy-source-if-none-match"),
    );
    let range = text(headers, &HeaderName::from_static("x-amz-copy-source-range"));
    let range = range.and_then(|range| ByteRange::parse(&range));
    Ok(Some(Source { at: At { bucket: bucket.into(), key: key.into() }, conditions, range }))
}

fn conditions(headers: &HeaderMap, if_match: &HeaderName, if_none_match: &HeaderName) -> Conditions {
    Conditions { if_match: text(headers, if_match), if_none_match: text(headers, if_none_match) }
}

fn text(headers: &HeaderMap, name: &HeaderName) -> Option<String> {
    headers.get(name).and_then(|value| value.to_str().ok()).map(str::to_owned)
}

fn decode(path: &str) -> Result<String, Fault> {
    let decoded = percent_encoding::percent_decode_str(path).decode_utf8();
    decoded.map(|text| text.into_owned()).map_err(|_| Fault::InvalidArgument("the path is not UTF-8"))
}

/// A query string's names and values.
struct Query(Vec<(String, String)>);

impl Query {
    fn parse(text: &str) -> Self {
        Self(url::form_urlencoded::parse(text.as_bytes()).into_owned().collect())
    }

    fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(found, _)| found == name).map(|(_, value)| value.as_str())
    }

    fn has(&self, name: &str) -> bool {
        self.get(name).is_some()
    }

    fn text(&self, name: &str) -> String {
        self.get(name).unwrap_or_default().to_owned()
    }
}
