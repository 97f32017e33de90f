//! What a service may answer, byte by byte: a server that says what it is told, one answer a connection.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener};

use forebay_core::Version;
use forebay_io::object::{Condition, Counters, OperationKind};

use super::*;

const EMPTY_LIST: &str = "<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>";
const WHOLE: &str = "0123456789";

/// An answer with status, headers and body; a body shorter than its length breaks off.
pub(super) fn answer(status: &str, headers: &str, length: usize, body: &str) -> String {
    format!("HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close\r\n{headers}\r\n{body}")
}

fn failure(status: &str, code: &str) -> String {
    let body =
        format!("<?xml version=\"1.0\"?>\n<Error><Code>{code}</Code><Message>because</Message></Error>");
    answer(status, "", body.len(), &body)
}

pub(super) fn found(length: usize, headers: &str, body: &str) -> String {
    let headers = format!("ETag: \"v1\"\r\nLast-Modified: Wed, 01 May 2024 10:00:00 GMT\r\n{headers}");
    answer(
        if headers.contains("Content-Range") { "206 Partial Content" } else { "200 OK" },
        &headers,
        length,
        body,
    )
}

/// Serves `answers` in turn and returns the heads of the requests through the channel.
fn serve(answers: Vec<String>) -> (SocketAddr, std::sync::mpsc::Receiver<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback has free ports");
    let address = listener.local_addr().expect("a bound socket has an address");
    let (heads, received) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let mut answers = VecDeque::from(answers);
        while let Some(answer) = answers.pop_front() {
            let (mut stream, _) = listener.accept().expect("a connection");
            let mut reader = BufReader::new(stream.try_clone().expect("a socket can be shared"));
            let (mut head, mut length) = (String::new(), 0);
            loop {
                let mut line = String::new();
                reader.read_line(&mut line).expect("a header");
                if let Some(value) = line.to_lowercase().strip_prefix("content-length:") {
                    length = value.trim().parse().expect("a length");
                }
                if line.trim().is_empty() {
                    break;
                }
                head.push_str(&line);
            }
            reader.read_exact(&mut vec![0; length]).expect("the announced body");
            heads.send(head).expect("the test listens");
            stream.write_all(answer.as_bytes()).expect("the client listens");
        }
    });
    (address, received)
}

/// Opens a bucket at a server that answers the opening's listing and then `answers`.
async fn told(answers: Vec<String>) -> (Bucket, std::sync::mpsc::Receiver<String>) {
    told_with(answers, &[]).await
}

/// The same with further options.
async fn told_with(
    answers: Vec<String>,
    further: &[(&str, &str)],
) -> (Bucket, std::sync::mpsc::Receiver<String>) {
    told_as(answers, further, None).await
}

/// The same, writing with a storage class.
pub(super) async fn told_as(
    answers: Vec<String>,
    further: &[(&str, &str)],
    class: Option<&str>,
) -> (Bucket, std::sync::mpsc::Receiver<String>) {
    let first = answer("200 OK", "", EMPTY_LIST.len(), EMPTY_LIST);
    let (address, heads) = serve(std::iter::once(first).chain(answers).collect());
    let options = [
        ("aws_endpoint", format!("http://{address}")),
        ("aws_region", "us-east-1".into()),
        ("aws_access_key_id", "key".into()),
        ("aws_secret_access_key", "secret".into()),
    ];
    let further = further.iter().map(|(name, value)| (*name, (*value).to_owned()));
    let options = options.into_iter().chain(further).map(|(name, value)| (name.to_owned(), value)).collect();
    let storage_class = class.map(str::to_owned);
    let settings = StoreSettings { options, storage_class, ..StoreSettings::default() };
    let bucket = Bucket::open(&"s3://told".parse().expect("a valid URL"), &settings).await.expect("open");
    heads.recv().expect("the opening's listing");
    (bucket, heads)
}

fn cost(counters: &Counters, kind: OperationKind) -> (u64, u64) {
    (counters.of(kind).requests, counters.retries)
}

#[tokio::test]
async fn answers_that_mean_later_are_tried_again() {
    let ok = answer("200 OK", "ETag: \"v1\"\r\n", 0, "");
    let (bucket, _heads) = told(vec![
        failure("503 Slow Down", "SlowDown"),
        failure("429 Too Many Requests", ""),
        failure("500 Internal Server Error", "InternalError"),
        failure("409 Conflict", "ConditionalRequestConflict"),
        ok,
    ])
    .await;
    let put = bucket.put(&key("a"), "x".into(), Condition::IfAbsent).await.expect("put");
    assert_eq!(put.version.as_str(), "\"v1\"");
    assert_eq!(cost(&bucket.counters(), OperationKind::Put), (5, 4));
}

#[tokio::test]
async fn answers_that_mean_no_are_not() {
    let cases = [
        ("403 Forbidden", "AccessDenied", ErrorKind::Denied),
        ("403 Forbidden", "SignatureDoesNotMatch", ErrorKind::Denied),
        ("404 Not Found", "NoSuchBucket", ErrorKind::NotFound),
        ("400 Bad Request", "AuthorizationHeaderMalformed", ErrorKind::Invalid),
        ("301 Moved Permanently", "PermanentRedirect", ErrorKind::Invalid),
        ("412 Precondition Failed", "PreconditionFailed", ErrorKind::Conflict),
        ("501 Not Implemented", "NotImplemented", ErrorKind::Unsupported),
        ("400 Bad Request", "InvalidArgument", ErrorKind::Refused),
        ("403 Forbidden", "InvalidObjectState", ErrorKind::Refused),
        ("403 Forbidden", "SecondLevelDomainForbidden", ErrorKind::Invalid),
    ];
    for (status, code, kind) in cases {
        // Whoever is refused looks what is there.
        let (bucket, _heads) = told(vec![failure(status, code), found(1, "", "")]).await;
        let error = bucket.put(&key("a"), "x".into(), Condition::IfAbsent).await.expect_err(code);
        assert_eq!(error.kind(), kind, "{code}: {error}");
        assert!(kind == ErrorKind::Conflict || error.hint().is_some(), "{code}: {error}");
        assert_eq!(cost(&bucket.counters(), OperationKind::Put), (1, 0), "{code}");
    }
}

#[tokio::test]
async fn a_body_that_breaks_off_is_resumed_where_it_stopped() {
    let rest = "Content-Range: bytes 4-9/10\r\n";
    let (bucket, heads) = told(vec![
        found(10, "", &WHOLE[..4]),
        failure("503 Service Unavailable", "ServiceUnavailable"),
        found(6, rest, &WHOLE[4..]),
    ])
    .await;
    let (read, _) = bucket.get_whole(&key("a")).await.expect("get");
    assert_eq!(read.as_ref(), WHOLE.as_bytes());
    let last = heads.iter().nth(2).expect("three requests").to_lowercase();
    assert!(last.contains("range: bytes=4-9") && last.contains("if-match: \"v1\""), "{last}");
    assert_eq!(cost(&bucket.counters(), OperationKind::Get), (3, 2));
}

/// S3 may answer 200 to a copy or a completion and put the error into the body. Of copies only the two codes that
/// object_store looks for were believed: any other passed for a copy, and what lay there before for what it made.
#[tokio::test]
async fn an_error_inside_a_success_is_an_error() {
    let done = "<CopyObjectResult><ETag>\"v1\"</ETag></CopyObjectResult>";
    for code in ["InternalError", "ServiceUnavailable", "RequestTimeout"] {
        let busy = format!("<Error><Code>{code}</Code><Message>later</Message></Error>");
        let (bucket, _heads) = told(vec![
            answer("200 OK", "", busy.len(), &busy),
            answer("200 OK", "", done.len(), done),
            found(1, "", ""),
        ])
        .await;
        bucket.copy(&key("a"), &key("b"), 1, &Condition::Always).await.expect("copy");
        assert_eq!(cost(&bucket.counters(), OperationKind::Copy), (2, 1), "{code}");
    }
}

/// The same of errors that stay, and of an answer that names no copy.
#[tokio::test]
async fn a_success_without_a_copy_is_none() {
    let cases = [
        ("<Error><Code>AccessDenied</Code><Message>no</Message></Error>", ErrorKind::Denied),
        ("<Error><Code>PreconditionFailed</Code><Message>no</Message></Error>", ErrorKind::Conflict),
        ("<CopyObjectResult></CopyObjectResult>", ErrorKind::Unavailable),
        ("", ErrorKind::Unavailable),
    ];
    for (body, kind) in cases {
        let (bucket, _heads) = told(vec![answer("200 OK", "", body.len(), body), found(1, "", "")]).await;
        let copied = bucket.copy(&key("a"), &key("b"), 1, &Condition::Always).await;
        assert_kind(copied, kind);
        assert_eq!(cost(&bucket.counters(), OperationKind::Copy), (1, 0), "{body}");
    }
}

/// An error about a key that nobody had asked for, as of a server that spells keys its own way, ended the process's task by a
/// panic; and the name of a deleted object was taken for an error.
#[tokio::test]
async fn keys_in_the_answer_to_a_deletion_are_no_errors() {
    let result = |inside: &str| {
        let body = format!("<?xml version=\"1.0\"?>\n<DeleteResult>{inside}</DeleteResult>");
        answer("200 OK", "", body.len(), &body)
    };
    let failed = |code: &str| {
        result(&format!("<Error><Key>x%2Fb</Key><Code>{code}</Code><Message>no</Message></Error>"))
    };
    let keys = [key("x/SlowDown.txt"), key("x/InternalError")];
    let deleted = "<Deleted><Key>x/SlowDown.txt</Key></Deleted><Deleted><Key>x/InternalError</Key></Deleted>";
    let (bucket, heads) = told(vec![failed("InternalError"), result(deleted)]).await;
    bucket.delete_many(&keys).await.expect("deleted");
    assert_eq!(cost(&bucket.counters(), OperationKind::Delete), (2, 1));
    let head = heads.recv().expect("a request").to_lowercase();
    for part in ["post /told", "delete", "content-md5: ", "x-amz-checksum-sha256: "] {
        assert!(head.contains(part), "{part} in {head}");
    }
    let (bucket, _heads) = told(vec![failed("AccessDenied")]).await;
    assert_kind(bucket.delete_many(&keys).await, ErrorKind::Denied);
}

/// One byte that is not ASCII, in the file name that another tool gave an object, made the whole object unreadable.
#[tokio::test]
async fn an_object_whose_headers_are_not_ascii_is_read() {
    for header in [
        "Content-Disposition: attachment; filename=\"caf\u{e9}.bin\"",
        "Content-Type: text/\u{fc}ml\u{e4}ut",
        "Cache-Control: \u{201e}none\u{201c}",
        "x-amz-meta-title: \u{65e5}\u{672c}",
    ] {
        let headers = format!("{header}\r\nx-amz-meta-forebaywrite: token\r\n");
        let (bucket, _heads) =
            told(vec![found(10, &headers, WHOLE), found(10, &headers, ""), found(10, &headers, "")]).await;
        let (read, info) = bucket.get_whole(&key("a")).await.expect(header);
        assert_eq!((read.as_ref(), info.version.as_str()), (WHOLE.as_bytes(), "\"v1\""), "{header}");
        let found = bucket.head(&key("a")).await.expect(header).expect("it is there");
        assert_eq!(found.size, 10, "{header}");
        let token = bucket.token_of(&key("a")).await.expect(header);
        assert_eq!(token.as_deref(), Some("token"), "what else there is stays: {header}");
    }
}

/// Only conditional writes and uploads carry the token: what a user wrote plainly stays plain.
#[tokio::test]
async fn plain_writes_carry_no_metadata() {
    let ok = || answer("200 OK", "ETag: \"v1\"\r\n", 0, "");
    let (bucket, heads) = told(vec![ok(), ok()]).await;
    bucket.put(&key("a"), "x".into(), Condition::Always).await.expect("put");
    bucket.put(&key("a"), "x".into(), Condition::IfAbsent).await.expect("put");
    let heads: Vec<String> = heads.iter().take(2).collect();
    let carries: Vec<bool> = heads.iter().map(|head| head.contains("x-amz-meta-forebaywrite")).collect();
    assert_eq!(carries, [false, true], "{heads:?}");
}

/// A rewritten file that is encrypted with a key of one's own was never sealed: copies of parts did not bring the key.
#[tokio::test]
async fn copies_of_parts_bring_a_key_of_ones_own() {
    let ok = |body: &str| answer("200 OK", "", body.len(), body);
    let key_of_32_bytes = "MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE=";
    let options = [("aws_server_side_encryption", "sse-c"), ("aws_sse_customer_key_base64", key_of_32_bytes)];
    let answers = vec![
        ok("<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>"),
        ok("<CopyPartResult><ETag>\"p\"</ETag></CopyPartResult>"),
        ok("<CompleteMultipartUploadResult><ETag>\"v2\"</ETag></CompleteMultipartUploadResult>"),
    ];
    let (bucket, heads) = told_with(answers, &options).await;
    let mut upload = bucket.upload(&key("to")).await.expect("upload");
    upload.copy_from(&key("from"), &Version::new("\"v1\""), 0..8 << 20).await.expect("copy");
    let made = upload.complete(Condition::Always).await.expect("complete");
    assert_eq!(made.version.as_str(), "\"v2\"");
    let [created, copied, completed] = [(); 3].map(|()| heads.recv().expect("a request").to_lowercase());
    let own = format!("x-amz-server-side-encryption-customer-key: {}", key_of_32_bytes.to_lowercase());
    let source =
        format!("x-amz-copy-source-server-side-encryption-customer-key: {}", key_of_32_bytes.to_lowercase());
    for head in [&created, &copied, &completed] {
        assert!(
            head.contains(&own) && head.contains("x-amz-server-side-encryption-customer-key-md5: "),
            "{head}"
        );
    }
    assert!(copied.contains(&source) && !created.contains(&source), "{copied}");
}
