//! Credentials that change, and by whose clock.

use std::sync::atomic::{AtomicI64, Ordering};

use aws_credential_types::provider::error::CredentialsError;

use super::*;

/// Gives keys 1, 2, 3, ... that live 100 s; fails while `fails`.
#[derive(Debug)]
struct Counting {
    clock: Clock,
    given: AtomicI64,
    fails: AtomicI64,
}

impl ProvideCredentials for Counting {
    fn provide_credentials<'a>(&'a self) -> future::ProvideCredentials<'a>
    where
        Self: 'a,
    {
        let number = self.given.fetch_add(1, Ordering::Relaxed) + 1;
        if self.fails.load(Ordering::Relaxed) > 0 {
            return future::ProvideCredentials::ready(Err(CredentialsError::provider_error("no luck")));
        }
        let now = u64::try_from(self.clock.wall().seconds).expect("after 1970");
        let expires = UNIX_EPOCH + Duration::from_secs(now + 100);
        let given = Credentials::new(format!("key-{number}"), "secret", None, Some(expires), "test");
        future::ProvideCredentials::ready(Ok(given))
    }
}

/// Credentials that are counted, by a clock that stands still.
fn counted() -> (Clock, Arc<Counting>, Renewed) {
    let (clock, [given, fails]) = (Clock::manual(), [0, 0].map(AtomicI64::new));
    let counting = Arc::new(Counting { clock: clock.clone(), given, fails });
    let shared: Arc<dyn ProvideCredentials> = counting.clone();
    let provider = SharedCredentialsProvider::new(shared);
    let renewed = Renewed::over(Origin::Profile("lab".into()), provider, clock.clone());
    (clock, counting, renewed)
}

#[tokio::test]
async fn credentials_are_renewed_in_time_and_a_failure_leaves_the_old_ones() {
    let (clock, counting, renewed) = counted();
    let key = async || renewed.get_credential().await.map(|credential| credential.key_id.clone());
    let step = |seconds| clock.advance(Duration::from_secs(seconds));
    assert_eq!(key().await.expect("first"), "key-1");
    step(74);
    assert_eq!(key().await.expect("still good"), "key-1");
    step(1);
    assert_eq!(key().await.expect("a quarter is left"), "key-2");
    counting.fails.store(1, Ordering::Relaxed);
    step(80);
    assert_eq!(key().await.expect("the old ones hold"), "key-2");
    assert_eq!(key().await.expect("and are not asked for at each request"), "key-2");
    assert_eq!(counting.given.load(Ordering::Relaxed), 3);
    step(20);
    let error = key().await.expect_err("they have expired").to_string();
    assert!(error.contains("AWS profile `lab`") && error.contains("no luck"), "{error}");
    counting.fails.store(0, Ordering::Relaxed);
    assert_eq!(key().await.expect("it comes back"), "key-5");
}

#[tokio::test]
async fn credentials_that_the_store_refuses_are_renewed_at_most_once_per_pause() {
    let (clock, counting, renewed) = counted();
    let key = async || renewed.get_credential().await.map(|credential| credential.key_id.clone());
    assert_eq!(key().await.expect("first"), "key-1");
    clock.advance(PAUSE);
    let first = renewed.current();
    for _ in 0..3 {
        assert!(renewed.renew_refused(first.clone()).await, "the next request has others");
        assert_eq!(key().await.expect("renewed, once"), "key-2");
    }
    assert!(!renewed.renew_refused(renewed.current()).await, "and they are refused as well");
    clock.advance(PAUSE);
    counting.fails.store(1, Ordering::Relaxed);
    assert!(!renewed.renew_refused(renewed.current()).await, "there are no others");
    assert_eq!(key().await.expect("the old ones"), "key-2");
    assert_eq!(counting.given.load(Ordering::Relaxed), 3);
}

fn write_keys(folder: &tempfile::TempDir, text: &str) {
    std::fs::write(folder.path().join("credentials"), text).expect("writable");
}

/// Keys of a file were read once, when it was mounted: a training whose keys were replaced lost its store until its end.
#[tokio::test]
async fn keys_of_a_file_are_read_anew() {
    let folder = tempfile::tempdir().expect("a folder");
    let keys = |id: &str| format!("[lab]\naws_access_key_id = {id}\naws_secret_access_key = s\n");
    write_keys(&folder, &keys("one"));
    let path = |name: &str| folder.path().join(name).display().to_string();
    let files = ProfileFiles::of(&[
        ("aws_profile".to_owned(), "lab".to_owned()),
        ("aws_shared_credentials_file".to_owned(), path("credentials")),
        ("aws_config_file".to_owned(), path("config")),
    ]);
    let (clock, provider) = (Clock::manual(), SharedCredentialsProvider::new(files.clone()));
    let renewed = Renewed::over(Origin::Keys(files), provider, clock.clone());
    let key = async || renewed.get_credential().await.map(|credential| credential.key_id.clone());
    assert_eq!(key().await.expect("first"), "one");
    write_keys(&folder, &keys("two"));
    clock.advance(REREAD - Duration::from_secs(1));
    assert_eq!(key().await.expect("not looked at yet"), "one");
    clock.advance(Duration::from_secs(1));
    assert_eq!(key().await.expect("the file is read again"), "two");
    let refused = renewed.current();
    assert!(!renewed.renew_refused(refused.clone()).await, "it still holds what was refused");
    write_keys(&folder, &keys("three"));
    assert!(renewed.renew_refused(refused.clone()).await, "it holds others");
    assert_eq!(key().await.expect("at once"), "three");
    write_keys(&folder, &keys("four"));
    assert!(renewed.renew_refused(refused).await, "who was refused before is sent on");
    assert_eq!(key().await.expect("and reads nothing"), "three");
    // Somebody is writing it, or took it away.
    for broken in ["", "[lab]\naws_access_key_id = five\n", "[other]\n"] {
        write_keys(&folder, broken);
        assert!(!renewed.renew_refused(renewed.current()).await, "no others: {broken}");
        clock.advance(REREAD);
        assert_eq!(key().await.expect("the old ones"), "three");
    }
    write_keys(&folder, &keys("five"));
    clock.advance(PAUSE);
    assert_eq!(key().await.expect("it is whole again"), "five");
}

#[tokio::test]
async fn a_profile_with_one_key_of_two_says_which_it_lacks() {
    let folder = tempfile::tempdir().expect("a folder");
    for (text, lacks) in [
        ("[default]\naws_access_key_id = a", "aws_secret_access_key"),
        ("[default]\naws_secret_access_key = s\naws_access_key_id =", "aws_access_key_id"),
    ] {
        write_keys(&folder, text);
        let file = folder.path().join("credentials").display().to_string();
        let files = ProfileFiles::of(&[("aws_shared_credentials_file".to_owned(), file)]);
        let failed = Renewed::open(Origin::Keys(files), None, None).await.expect_err(lacks).to_string();
        assert!(failed.contains("AWS profile `default`") && failed.ends_with(lacks), "{failed}");
    }
}

/// Gives key 1 at once; the next one when it is allowed to.
#[derive(Debug, Default)]
struct Hanging {
    asked: AtomicI64,
    may_go_on: tokio::sync::Notify,
}

impl ProvideCredentials for Hanging {
    fn provide_credentials<'a>(&'a self) -> future::ProvideCredentials<'a>
    where
        Self: 'a,
    {
        let number = self.asked.fetch_add(1, Ordering::Relaxed) + 1;
        future::ProvideCredentials::new(async move {
            if number > 1 {
                self.may_go_on.notified().await;
            }
            let expires = UNIX_EPOCH + Duration::from_secs(number as u64 * 100);
            Ok(Credentials::new(format!("key-{number}"), "secret", None, Some(expires), "test"))
        })
    }
}

/// A program that took longer than a request may was begun anew by each, and never heard.
#[tokio::test(start_paused = true)]
async fn a_source_that_hangs_costs_nothing_while_the_old_credentials_hold() {
    let (clock, hanging) = (Clock::manual(), Arc::new(Hanging::default()));
    let shared: Arc<dyn ProvideCredentials> = hanging.clone();
    let origin = Origin::Profile("lab".into());
    let start = u64::try_from(clock.wall().seconds).expect("after 1970");
    assert!(start < 70, "the clock begins before the first credentials are renewed");
    let renewed = Renewed::over(origin, SharedCredentialsProvider::new(shared), clock.clone());
    let key = async || renewed.get_credential().await.map(|credential| credential.key_id.clone());
    assert_eq!(key().await.expect("first"), "key-1");
    clock.advance(Duration::from_secs(95 - start));
    let began = tokio::time::Instant::now();
    for _ in 0..20 {
        assert_eq!(key().await.expect("the old ones hold"), "key-1");
    }
    assert_eq!(began.elapsed(), GRACE, "the first one waits a moment, for all");
    clock.advance(Duration::from_secs(10));
    // Requests that wait are given up, and the program goes on.
    for _ in 0..3 {
        tokio::time::timeout(Duration::from_secs(10), key()).await.expect_err("there are none");
    }
    hanging.may_go_on.notify_one();
    assert_eq!(key().await.expect("at last"), "key-2");
    assert_eq!(hanging.asked.load(Ordering::Relaxed), 2);
}
