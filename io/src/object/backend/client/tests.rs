//! What the client makes of requests and options.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;

use http::Method;
use http::header::CONTENT_LENGTH;
use object_store::PutPayload;

use super::*;

/// Takes one request; gives its head and body.
fn take_one(listener: TcpListener) -> (String, Vec<u8>) {
    let (stream, _) = listener.accept().expect("a connection");
    let mut reader = BufReader::new(stream);
    let (mut head, mut line) = (String::new(), String::new());
    while reader.read_line(&mut line).expect("a line") > 2 {
        head.push_str(&std::mem::take(&mut line).to_ascii_lowercase());
    }
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")).expect("a length");
    let mut body = vec![0; length.parse().expect("a number")];
    reader.read_exact(&mut body).expect("the body");
    let answer = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";
    reader.into_inner().write_all(answer.as_bytes()).expect("answered");
    (head, body)
}

#[tokio::test]
async fn a_body_of_several_chunks_arrives_in_pieces_that_are_told() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}/b/k", listener.local_addr().expect("an address"));
    let server = tokio::task::spawn_blocking(move || take_one(listener));
    let chunks =
        [3 * PIECE + 1, 0, 5, PIECE].map(|size| (0..size).map(|at| (at % 251) as u8).collect::<Vec<_>>());
    let whole = chunks.concat();
    let payload: PutPayload = chunks.into_iter().map(Bytes::from).collect();
    let request = http::Request::builder().method(Method::PUT).uri(url).header(CONTENT_LENGTH, whole.len());
    let request = request.body(HttpRequestBody::from(payload)).expect("a request");
    let client = Client::new(&ClientOptions::new().with_allow_http(true)).expect("a client");
    let progress = Progress::default();
    let told = {
        let progress = progress.clone();
        tokio::spawn(async move {
            progress.made().await;
        })
    };
    let response = progress.watch(client.call(request)).await.expect("an answer");
    assert_eq!(response.into_body().bytes().await.expect("its body"), "ok");
    let (head, body) = server.await.expect("served");
    assert!(head.contains("user-agent: forebay/"), "{head}");
    assert!(!head.contains("transfer-encoding"), "a length is told, as signatures want it: {head}");
    assert!(body == whole, "{} bytes instead of {}", body.len(), whole.len());
    told.await.expect("pieces were told");
}

#[tokio::test]
async fn bodies_are_cut_into_pieces_and_nothing_else() {
    let pieces = |sizes: &[usize]| {
        let chunks: PutPayload = sizes.iter().map(|size| Bytes::from(vec![7; *size])).collect();
        let pieces = in_pieces(HttpRequestBody::from(chunks)).into_data_stream();
        pieces.map(|piece| piece.expect("a piece").len()).collect::<Vec<_>>()
    };
    assert_eq!(pieces(&[2 * PIECE + 1]).await, [PIECE, PIECE, 1]);
    assert_eq!(pieces(&[1, 0, PIECE, 0]).await, [1, PIECE]);
    assert_eq!(pieces(&[]).await, [0; 0]);
}

#[test]
fn options_that_do_not_parse_are_told() {
    let given =
        |key: ClientConfigKey, value: &str| Client::new(&ClientOptions::new().with_config(key, value));
    for (key, good, bad) in [
        (ClientConfigKey::ConnectTimeout, "1m 30s", "soon"),
        (ClientConfigKey::Http1Only, "No", "maybe"),
        (ClientConfigKey::PoolMaxIdlePerHost, "4", "-1"),
        (ClientConfigKey::Http2MaxFrameSize, "65536", "64KiB"),
        (ClientConfigKey::RandomizeAddresses, "off", "2"),
        (ClientConfigKey::ProxyUrl, "http://127.0.0.1:3128", "::"),
    ] {
        given(key, good).unwrap_or_else(|error| panic!("{key:?}: {error}"));
        let error = given(key, bad).expect_err("not an option");
        let named = key == ClientConfigKey::ProxyUrl || error.to_string().contains(key.as_ref());
        assert!(named, "{key:?}: {error}");
    }
}
