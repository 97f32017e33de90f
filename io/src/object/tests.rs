//! What needs a store made for the test. The contract over real stores is in the tests package.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use async_trait::async_trait;
use bytes::Bytes;
use forebay_core::{ErrorKind, ObjectKey};
use futures::stream::{BoxStream, StreamExt, TryStreamExt};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore, ObjectStoreExt,
    PutMode, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};
use parking_lot::Mutex;

use object_store::client::{HttpError, HttpErrorKind};

use super::backend::Plain;
use super::error::Fault;
use super::layer::map_body;
use super::request::{Reply, Request, Service};
use super::stack::Stack;
use super::*;

/// A store that answers writes in its own way and passes everything else on.
#[derive(Debug)]
struct Stubborn {
    inner: InMemory,
    manner: Manner,
}

#[derive(Debug, PartialEq)]
enum Manner {
    /// Conditions are accepted and not looked at.
    IgnoresConditions,
    /// Nothing may be written.
    Denies,
    /// Versions change from answer to answer.
    NoVersions,
}

impl std::fmt::Display for Stubborn {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Stubborn")
    }
}

#[async_trait]
impl ObjectStore for Stubborn {
    async fn put_opts(&self, key: &Path, payload: PutPayload, mut options: PutOptions) -> Result<PutResult> {
        match self.manner {
            Manner::IgnoresConditions => options.mode = PutMode::Overwrite,
            Manner::Denies => {
                return Err(object_store::Error::PermissionDenied {
                    path: key.to_string(),
                    source: "no".into(),
                });
            }
            Manner::NoVersions => {
                let put = self.inner.put_opts(key, payload, options).await?;
                return Ok(PutResult { e_tag: None, ..put });
            }
        }
        self.inner.put_opts(key, payload, options).await
    }

    async fn put_multipart_opts(
        &self,
        key: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.inner.put_multipart_opts(key, options).await
    }

    async fn get_opts(&self, key: &Path, options: GetOptions) -> Result<GetResult> {
        self.inner.get_opts(key, options).await
    }

    fn delete_stream(&self, keys: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        self.inner.delete_stream(keys)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.inner.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.inner.copy_opts(from, to, options).await
    }
}

async fn probe(manner: Manner) -> Capabilities {
    let url = "s3://stubborn".parse().expect("a valid URL");
    let inner = InMemory::new();
    Bucket::from_store(url, Arc::new(Stubborn { inner, manner })).probe().await.expect("probe")
}

#[tokio::test]
async fn the_probe_sees_through_stores_that_do_not_do_what_they_say() {
    let ignores = probe(Manner::IgnoresConditions).await;
    assert!(ignores.writable && ignores.range_get && ignores.conditional_get);
    assert!(!ignores.conditional_create && !ignores.conditional_update && !ignores.conditional_complete);
    assert!(!ignores.safe_for_many_writers());
    assert_eq!(probe(Manner::Denies).await, Capabilities::default());
    assert!(!probe(Manner::NoVersions).await.etag_stable);
}

/// Counts the requests that are in flight, the transfer of their bodies included.
#[derive(Debug)]
struct Crowd {
    inner: Plain,
    now: Arc<AtomicUsize>,
    most: AtomicUsize,
}

struct Leave(Arc<AtomicUsize>);

impl Drop for Leave {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

#[async_trait]
impl Service for Crowd {
    async fn call(&self, request: Request) -> Result<Reply> {
        let crowd = self.now.fetch_add(1, Ordering::SeqCst) + 1;
        self.most.fetch_max(crowd, Ordering::SeqCst);
        let leave = Leave(self.now.clone());
        tokio::task::yield_now().await;
        let reply = self.inner.call(request).await?;
        let Reply::Object(_) = reply else { return Ok(reply) };
        Ok(map_body(reply, |body| {
            let slow = futures::stream::unfold((body, leave), |(mut body, leave)| async move {
                tokio::task::yield_now().await;
                body.next().await.map(|chunk| (chunk, (body, leave)))
            });
            slow.boxed()
        }))
    }
}

#[tokio::test]
async fn requests_in_flight_are_bounded_with_their_bodies() {
    let inner = Plain::staged(Arc::new(InMemory::new()), true);
    let crowd = Arc::new(Crowd { inner, now: Arc::default(), most: AtomicUsize::new(0) });
    let settings = StoreSettings { max_in_flight: 3, ..StoreSettings::default() };
    let url = "s3://crowd".parse().expect("a valid URL");
    let bucket = Bucket::over(url, Stack::new(crowd.clone(), &settings));
    let key = ObjectKey::new("a");
    bucket.put(&key, "a".into(), Condition::Always).await.expect("put");
    let reads = (0..32).map(async |_| bucket.get_whole(&key).await.map(drop));
    futures::stream::iter(reads).buffer_unordered(32).try_collect::<()>().await.expect("reads");
    assert_eq!(crowd.most.load(Ordering::SeqCst), 3);
    assert_eq!(crowd.now.load(Ordering::SeqCst), 0, "all have left");
}

/// As the renewal of a lease, which is lost where it waits behind the bytes of files.
#[tokio::test]
async fn requests_that_stand_apart_wait_for_no_others() {
    let store = Arc::new(Plain::staged(Arc::new(InMemory::new()), true));
    let settings = StoreSettings { max_in_flight: 1, ..StoreSettings::default() };
    let bucket = Bucket::over("s3://b".parse().expect("a URL"), Stack::new(store, &settings));
    let (faults, [data, lease]) = (Faults::new(), ["data", "lease"].map(ObjectKey::new));
    let (busy, gate) = (bucket.with_faults(&faults), faults.gate(1));
    let apart = bucket.apart();
    let holds_up = busy.put(&data, "data".into(), Condition::Always);
    let others = async {
        gate.reached().await;
        let mut waits = std::pin::pin!(bucket.head(&lease));
        assert!(futures::poll!(&mut waits).is_pending(), "there is one place");
        apart.put(&lease, "lease".into(), Condition::Always).await.expect("put");
        apart.with_deadline_ms(1).head(&lease).await.expect("head").expect("the object");
        gate.open();
        assert!(waits.await.expect("head").is_some());
    };
    tokio::join!(holds_up, others).0.expect("put");
    assert_eq!(apart.counters().requests(), 4, "all are counted together");
}

/// Who lists a directory, or closes a small file, waits for nobody's gigabytes; these wait for each other.
#[tokio::test]
async fn short_requests_wait_for_no_bytes_of_others() {
    let store = Arc::new(Plain::staged(Arc::new(InMemory::new()), true));
    let settings = StoreSettings { max_in_flight: 1, ..StoreSettings::default() };
    let bucket = Bucket::over("s3://b".parse().expect("a URL"), Stack::new(store, &settings));
    let (faults, [data, small]) = (Faults::new(), ["data", "small"].map(ObjectKey::new));
    let (busy, gate) = (bucket.with_faults(&faults), faults.gate(1));
    let large = Bytes::from(vec![1; 1 << 20]);
    let holds_up = busy.put(&data, large.clone(), Condition::Always);
    let others = async {
        gate.reached().await;
        let mut waits = std::pin::pin!(bucket.put(&data, large.clone(), Condition::Always));
        assert!(futures::poll!(&mut waits).is_pending(), "there is one place");
        bucket.put(&small, "small".into(), Condition::Always).await.expect("put");
        let info = bucket.head(&small).await.expect("head").expect("the object");
        let read = bucket.get(&small, Some(&info.version), 1..4).await.expect("read");
        assert_eq!(read, "mal");
        assert_eq!(bucket.list("").try_collect::<Vec<_>>().await.expect("list").len(), 1);
        bucket.delete(&small).await.expect("deleted");
        assert!(futures::poll!(&mut waits).is_pending());
        gate.open();
        waits.await.expect("put");
    };
    tokio::join!(holds_up, others).0.expect("put");
}

/// An engine inside the bucket sees object_store's trait, and goes through the same counts and faults.
#[tokio::test]
async fn the_store_of_a_bucket_goes_through_its_decorators() {
    let faults = Faults::new();
    let bucket = Bucket::in_memory().with_faults(&faults);
    let store = bucket.store();
    let path = Path::from("tree/manifest");
    faults.script(OperationKind::Put, 1, FaultMode::LoseReply);
    let create = PutOptions { mode: PutMode::Create, ..PutOptions::default() };
    let put = store.put_opts(&path, "one".into(), create.clone()).await.expect("settled by its token");
    assert_eq!(store.head(&path).await.expect("head").e_tag, put.e_tag);
    let refused = store.put_opts(&path, "two".into(), create).await;
    assert!(matches!(refused, Err(object_store::Error::AlreadyExists { .. })), "{refused:?}");
    let mut upload = store.put_multipart(&Path::from("tree/large")).await.expect("upload");
    faults.script(OperationKind::Part, 1, FaultMode::Before);
    let (first, second) = (upload.put_part("first ".into()), upload.put_part("second".into()));
    second.await.expect("part");
    first.await.expect("part");
    upload.complete().await.expect("complete");
    faults.script(OperationKind::Get, 1, FaultMode::BreakBody(4));
    let read = store.get(&Path::from("tree/large")).await.expect("get").bytes().await.expect("body");
    assert_eq!(read, Bytes::from("first second"));
    let listed: Vec<_> = store.list(Some(&Path::from("tree"))).try_collect().await.expect("list");
    assert_eq!(listed.len(), 2);
    let later: Vec<_> =
        store.list_with_offset(None, &Path::from("tree/large")).try_collect().await.expect("list");
    assert_eq!(later.len(), 1);
    store.copy_if_not_exists(&path, &Path::from("tree/copy")).await.expect("copy");
    let keys =
        futures::stream::iter(["copy", "large", "manifest"].map(|n| Ok(Path::from(format!("tree/{n}")))));
    assert_eq!(store.delete_stream(keys.boxed()).try_collect::<Vec<_>>().await.expect("delete").len(), 3);
    assert!(bucket.list("").try_collect::<Vec<_>>().await.expect("list").is_empty());
    assert_eq!((bucket.counters().retries, faults.injected()), (3, 3));
    assert_eq!(bucket.counters().of(OperationKind::Delete).requests, 1);
}

#[tokio::test]
async fn a_body_is_not_resumed_from_another_version() {
    let faults = Faults::new();
    let bucket = Bucket::in_memory().with_faults(&faults);
    let key = ObjectKey::new("a");
    bucket.put(&key, Bytes::from(vec![1; 1000]), Condition::Always).await.expect("put");
    faults.script(OperationKind::Get, 1, FaultMode::BreakBody(500));
    let body = bucket.store().get(&Path::from("a")).await.expect("get");
    bucket.put(&key, Bytes::from(vec![2; 1000]), Condition::Always).await.expect("replace");
    let broken = body.bytes().await;
    assert!(matches!(broken, Err(object_store::Error::Precondition { .. })), "{broken:?}");
    faults.script(OperationKind::Get, 1, FaultMode::Before);
    let old = forebay_core::Version::new("\"0\"");
    assert_eq!(bucket.get(&key, Some(&old), 0..9).await.expect_err("stale").kind(), ErrorKind::Stale);
}

/// A store, or something on the way to it, that looks at no condition of a read.
#[derive(Debug)]
struct Heedless(Plain);

#[async_trait]
impl Service for Heedless {
    async fn call(&self, mut request: Request) -> Result<Reply> {
        if let Request::Get { options, .. } = &mut request {
            options.if_match = None;
        }
        self.0.call(request).await
    }
}

/// Where a store gave whatever was there, a read of one version was given bytes of two.
#[tokio::test]
async fn a_store_that_ignores_conditions_of_reads_mixes_no_versions() {
    let store = Arc::new(Heedless(Plain::staged(Arc::new(InMemory::new()), true)));
    let stack = Stack::new(store, &StoreSettings::default());
    let inner = Bucket::over("s3://b".parse().expect("a URL"), stack);
    let faults = Faults::new();
    let (bucket, key) = (inner.with_faults(&faults), ObjectKey::new("a"));
    let old = inner.put(&key, Bytes::from(vec![1; 1000]), Condition::Always).await.expect("put").version;
    let before = inner.counters();
    // The same version as another answer of a store spells it, or what a proxy made of it.
    let bare = old.as_str().trim_matches('"');
    for spelt in [old.as_str().to_owned(), format!("\"{bare}\""), format!("W/\"{bare}\""), bare.to_owned()] {
        let version = forebay_core::Version::new(spelt);
        assert_eq!(bucket.get(&key, Some(&version), 0..9).await.expect("read"), [1; 9].as_slice());
    }
    assert_eq!(inner.counters().since(&before).requests(), 4, "nothing more is asked");
    let body = async || bucket.get_whole(&key).await.map(|(bytes, _)| bytes);
    faults.script(OperationKind::Get, 1, FaultMode::BreakBody(500));
    assert_eq!(body().await.expect("resumed"), vec![1; 1000]);
    // Replaced in the middle of a body that breaks.
    faults.script(OperationKind::Get, 1, FaultMode::BreakBody(500));
    let read = bucket.store().get(&Path::from("a")).await.expect("get");
    inner.put(&key, Bytes::from(vec![2; 1000]), Condition::Always).await.expect("replace");
    let broken = read.bytes().await.err();
    assert!(matches!(broken, Some(object_store::Error::Precondition { .. })), "{broken:?}");
    let stale = bucket.get(&key, Some(&old), 0..9).await;
    assert_eq!(stale.expect_err("another version").kind(), ErrorKind::Stale);
    assert_eq!(body().await.expect("whatever is there"), vec![2; 1000]);
}

/// As the tree in the bucket reads, which asks for what changed since: it is answered 304 or the object.
#[tokio::test]
async fn a_412_to_a_read_that_no_condition_forbids_is_asked_again() {
    let (faults, inner, key) = (Faults::new(), Bucket::in_memory(), ObjectKey::new("a"));
    let bucket = inner.with_faults(&faults);
    inner.put(&key, Bytes::from(vec![1; 10]), Condition::Always).await.expect("put");
    let known = |e_tag: &str| GetOptions { if_none_match: Some(e_tag.to_owned()), ..GetOptions::default() };
    faults.script(OperationKind::Get, 1, FaultMode::Refuse);
    let read = bucket.store().get_opts(&Path::from("a"), known("\"another\"")).await.expect("read");
    assert_eq!(read.bytes().await.expect("bytes"), vec![1; 10]);
    // One that goes on is told.
    for nth in 1..100 {
        faults.script(OperationKind::Get, nth, FaultMode::Refuse);
    }
    let refused = bucket.store().get_opts(&Path::from("a"), known("\"another\"")).await;
    assert!(matches!(refused, Err(object_store::Error::Precondition { .. })), "{refused:?}");
}

#[tokio::test]
async fn an_object_that_is_replaced_while_it_is_read_whole_is_read_again() {
    let (faults, inner, key) = (Faults::new(), Bucket::in_memory(), ObjectKey::new("a"));
    let bucket = inner.with_faults(&faults);
    inner.put(&key, Bytes::from(vec![1; 1000]), Condition::Always).await.expect("put");
    faults.script(OperationKind::Get, 1, FaultMode::BreakBody(500));
    let gate = faults.gate(2);
    let replace = async {
        gate.reached().await;
        inner.put(&key, Bytes::from(vec![2; 1000]), Condition::Always).await.expect("replace");
        gate.open();
    };
    let (read, ()) = tokio::join!(bucket.get_whole(&key), replace);
    assert!(read.expect("read").0.iter().all(|byte| *byte == 2));
}

/// A store that answers nothing but one error.
#[derive(Debug)]
struct Failing {
    asked: AtomicUsize,
    error: fn() -> object_store::Error,
    /// So often; then it answers.
    times: usize,
    store: Plain,
}

#[async_trait]
impl Service for Failing {
    async fn call(&self, request: Request) -> Result<Reply> {
        match self.asked.fetch_add(1, Ordering::SeqCst) < self.times {
            true => Err((self.error)()),
            false => self.store.call(request).await,
        }
    }
}

/// An overloaded store was given up by a mount after 5 s, whatever deadline it had been given.
#[tokio::test(start_paused = true)]
async fn opening_waits_for_a_busy_store_and_not_for_one_that_is_not_there() {
    let busy = || Fault::Service { status: 503, code: "SlowDown".into(), message: String::new() }.into();
    let absent = || {
        let refused = std::io::Error::from(std::io::ErrorKind::ConnectionRefused);
        let error = HttpError::new(HttpErrorKind::Connect, refused);
        object_store::Error::Generic { store: "S3", source: Box::new(error) }
    };
    // The waits of the first seven add up to 3.2 s to 6.4 s, each further one is 2.5 s to 5 s.
    for (error, times, answers) in [(busy as fn() -> _, 9, true), (busy, 100, false), (absent, 9, false)] {
        let store = Plain::staged(Arc::new(InMemory::new()), true);
        let failing = Arc::new(Failing { asked: AtomicUsize::new(0), error, times, store });
        let settings = StoreSettings { deadline_ms: 30_000, ..StoreSettings::default() };
        let bucket =
            Bucket::over("s3://b".parse().expect("a URL"), Stack::opening(failing.clone(), &settings));
        let checked = bucket.check().await;
        assert_eq!(checked.map_err(|error| error.kind()).is_ok(), answers, "{times} times");
        if !answers {
            let asked = failing.asked.load(Ordering::SeqCst);
            assert_eq!(asked > 9, times == 100, "asked {asked} times");
        }
    }
}

/// One slow moment of the metadata service, at the renewal of each hour, was EACCES for whoever read or wrote then; so was one
/// of a token service when what it had given was over.
#[tokio::test(start_paused = true)]
async fn a_moment_without_instance_metadata_is_waited_for_once_there_were_credentials() {
    let absent = || {
        let text = "error sending request for url (http://169.254.169.254/latest/api/token)";
        let error = HttpError::new(HttpErrorKind::Timeout, std::io::Error::other(text));
        object_store::Error::Generic { store: "S3", source: Box::new(error) }
    };
    let expired = || {
        let [origin, cause, hint] = ["role `lab`", "no route to host", "log in"].map(str::to_owned);
        Fault::Credentials { origin, cause, hint }.into()
    };
    let settings = StoreSettings { deadline_ms: 30_000, ..StoreSettings::default() };
    type Make = fn(Arc<Failing>, &StoreSettings) -> Stack;
    let opening: Make = |store, settings| Stack::opening(store, settings);
    let opened: Make = |store, settings| Stack::new(store, settings);
    let cases = [
        (
            absent as fn() -> object_store::Error,
            ["did not answer", "169.254.169.254"],
            "check AWS_ENDPOINT_URL",
        ),
        (expired, ["no credentials for s3://b from role `lab`", "no route to host"], "log in"),
    ];
    for (error, says, hint) in cases {
        let over = |stack: Make, times| {
            let store = Plain::staged(Arc::new(InMemory::new()), true);
            let failing = Arc::new(Failing { asked: AtomicUsize::new(0), error, times, store });
            let url = "s3://b".parse().expect("a URL");
            (Bucket::over(url, stack(failing.clone(), &settings)), failing)
        };
        // Whoever has none is told at once; a service that stays away is no matter of rights.
        for (stack, times, told, asked) in [(opening, 3, Some(ErrorKind::Denied), 1), (opened, 3, None, 4)] {
            let (bucket, failing) = over(stack, times);
            let put = bucket.put(&ObjectKey::new("k"), "v".into(), Condition::Always).await;
            assert_eq!(put.err().map(|error| error.kind()), told);
            assert_eq!(failing.asked.load(Ordering::SeqCst), asked);
        }
        let (bucket, _) = over(opened, 1000);
        let told = bucket.head(&ObjectKey::new("k")).await.expect_err("it stays away");
        assert_eq!(told.kind(), ErrorKind::Unavailable, "{told}");
        let text = told.to_string();
        assert!(says.iter().all(|said| text.contains(said)), "{text}");
        assert!(told.hint().is_some_and(|told| told.contains(hint)), "{:?}", told.hint());
    }
}

/// A store that takes its time for copies and completions.
#[derive(Debug)]
struct Thorough(Plain);

#[async_trait]
impl Service for Thorough {
    async fn call(&self, request: Request) -> Result<Reply> {
        if matches!(request, Request::Copy { .. } | Request::Complete { .. }) {
            tokio::time::sleep(std::time::Duration::from_secs(60)).await;
        }
        self.0.call(request).await
    }
}

/// A copy of a large object was given up after 10 s, and sent again beside the one that went on in the store.
#[tokio::test(start_paused = true)]
async fn a_copy_is_waited_for_as_long_as_its_bytes_take() {
    let store = Arc::new(Thorough(Plain::staged(Arc::new(InMemory::new()), true)));
    let stack = Stack::new(store, &StoreSettings::default());
    let bucket = Bucket::over("s3://b".parse().expect("a URL"), stack);
    let [from, to] = ["from", "to"].map(ObjectKey::new);
    bucket.put(&from, "bytes".into(), Condition::Always).await.expect("put");
    for (bytes, is_waited_for) in [(5 << 30, true), (5, false)] {
        let (before, begun) = (bucket.counters(), tokio::time::Instant::now());
        let copied = bucket.copy(&from, &to, bytes, &Condition::Always).await;
        let waited = begun.elapsed();
        let sent = bucket.counters().since(&before).of(OperationKind::Copy).requests;
        assert_eq!(copied.is_ok(), is_waited_for, "{bytes} bytes: {copied:?}");
        assert_eq!(sent, if is_waited_for { 1 } else { 3 });
        // By the clock that stands: the first attempt's ten seconds are of the thirty.
        assert_eq!(waited.as_secs(), if is_waited_for { 60 } else { 30 });
    }
}

/// S3 may need minutes to put many parts together; they were given up after 10 s, and the object was an outsider's.
#[tokio::test(start_paused = true)]
async fn an_upload_of_many_parts_has_time_to_be_completed() {
    let store = Arc::new(Thorough(Plain::staged(Arc::new(InMemory::new()), true)));
    let stack = Stack::new(store, &StoreSettings::default());
    let bucket = Bucket::over("s3://b".parse().expect("a URL"), stack);
    let key = ObjectKey::new("large");
    for (parts, is_waited_for) in [(1200, true), (3, false)] {
        let before = bucket.counters();
        let options = UploadOptions { part_bytes: Some(1), ..UploadOptions::default() };
        let mut upload = bucket.upload_with(&key, options).expect("upload");
        upload.write(vec![7; parts].into()).await.expect("write");
        let completed = upload.complete(Condition::Always).await;
        let sent = bucket.counters().since(&before).of(OperationKind::Complete).requests;
        assert_eq!(completed.is_ok(), is_waited_for, "{parts} parts: {completed:?}");
        assert_eq!(sent == 1, is_waited_for, "{sent} requests");
    }
}

/// A token that ran out between two attempts: the second one's denial was taken for the answer to both, and what the first
/// one brought came to a key that was free by all that was known.
#[tokio::test(start_paused = true)]
async fn a_denial_after_an_attempt_that_was_not_answered_settles_nothing() {
    let (faults, inner) = (Faults::new(), Bucket::in_memory());
    let (bucket, key) = (inner.with_faults(&faults), ObjectKey::new("a"));
    let put = async || bucket.put(&key, "new".into(), Condition::Always).await.expect_err("denied");
    faults.script(OperationKind::Put, 1, FaultMode::Deny);
    assert_eq!(put().await.kind(), ErrorKind::Denied, "the only attempt was answered");
    faults.script(OperationKind::Put, 1, FaultMode::LoseReply).script(OperationKind::Put, 2, FaultMode::Deny);
    let told = put().await;
    assert_eq!(told.kind(), ErrorKind::Unavailable, "{told}");
    assert!(told.message().contains("access to a in s3://memory is denied"), "{told}");
    assert!(inner.head(&key).await.expect("head").is_some(), "it was carried out");
    // Nobody doubts a read, or what the store itself put off.
    faults.script(OperationKind::Get, 1, FaultMode::Before).script(OperationKind::Get, 2, FaultMode::Deny);
    assert_eq!(bucket.get(&key, None, 0..1).await.expect_err("denied").kind(), ErrorKind::Denied);
    let answers: [fn() -> object_store::Error; 2] = [
        || Fault::Service { status: 503, code: "SlowDown".into(), message: String::new() }.into(),
        || Fault::Service { status: 403, code: "ExpiredToken".into(), message: "it expired".into() }.into(),
    ];
    let lost: fn() -> object_store::Error = || Fault::Stalled { waited_ms: 10_000 }.into();
    for (first, kind) in [(answers[0], ErrorKind::Denied), (lost, ErrorKind::Unavailable)] {
        let store = Arc::new(Answers(Mutex::new(vec![answers[1], first])));
        let bucket =
            Bucket::over("s3://b".parse().expect("a URL"), Stack::new(store, &StoreSettings::default()));
        let told = bucket.delete(&key).await.expect_err("the token ran out");
        assert_eq!(told.kind(), kind, "{told}");
        assert!(told.message().contains("credentials for s3://b have expired"), "{told}");
        assert!(told.hint().is_some_and(|hint| hint.contains("log in again")), "{told}");
    }
}

/// A store that answers with these errors, the last one first.
#[derive(Debug)]
struct Answers(Mutex<Vec<fn() -> object_store::Error>>);

#[async_trait]
impl Service for Answers {
    async fn call(&self, _: Request) -> Result<Reply> {
        Err(self.0.lock().pop().expect("one more")())
    }
}
