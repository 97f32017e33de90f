//! What went wrong with a store, in the terms of the caller and of the person in front of it.
//!
//! Two questions are answered here and nowhere else: is an error worth a retry, and what are its kind, cause and
//! hint once it leaves this module.

use std::error::Error as StdError;

use forebay_core::{Error, ErrorKind};
use object_store::client::{HttpError, HttpErrorKind};

/// The name under which this module's own errors appear in object_store's.
pub(super) const STORE: &str = "forebay";

/// The address at which clouds hand out credentials to their own machines.
const INSTANCE_METADATA: &str = "169.254.169.254";

/// Errors of Forebay's own that travel inside object_store's.
#[derive(Debug, thiserror::Error)]
pub(super) enum Fault {
    /// The service answered with an error of its own.
    #[error("the store answered {status} {code}: {message}")]
    Service { status: u16, code: String, message: String },
    /// No reply or no further byte came in time.
    #[error("no answer within {waited_ms} ms")]
    Stalled { waited_ms: u64 },
    /// A body ended before its announced length.
    #[error("the body ended {missing} bytes early")]
    Short { missing: u64 },
    /// Retries were exhausted.
    #[error("gave up after {attempts} attempts in {waited_ms} ms; last error: {cause}")]
    GaveUp { attempts: u64, waited_ms: u64, cause: object_store::Error },
    /// The last attempt failed for good, and one before it was not answered: it may have been carried out, or still be.
    #[error("{cause}; what became of an earlier attempt is not known")]
    Unsettled { cause: object_store::Error },
    /// There was no answer, and the request was to be sent once.
    #[error("{cause}; it may have been carried out, and is not sent again")]
    Unrepeated { cause: object_store::Error },
    /// A condition was said not to hold, and it does.
    #[error("the store refused what holds: {cause}")]
    Unfounded { cause: String },
    /// No credentials could be obtained.
    #[error("no credentials from {origin}: {cause}")]
    Credentials { origin: String, cause: String, hint: String },
    /// The handle may not write.
    #[error("this bucket is open read-only")]
    ReadOnly,
    /// The directory that is the bucket went away.
    #[error("the bucket's directory is not there")]
    RootGone,
    /// This process may change nothing now.
    #[error("not sent: {cause}")]
    Withheld { cause: String },
    /// A fault that a test asked for.
    #[error("injected fault: {0}")]
    Injected(&'static str),
}

impl From<Fault> for object_store::Error {
    fn from(fault: Fault) -> Self {
        Self::Generic { store: STORE, source: Box::new(fault) }
    }
}

/// An error for something that this store cannot do.
pub(super) fn unsupported(what: &str) -> object_store::Error {
    object_store::Error::NotSupported { source: what.to_owned().into() }
}

fn chain<'a>(error: &'a (dyn StdError + 'static)) -> impl Iterator<Item = &'a (dyn StdError + 'static)> {
    let next = |error: &&'a (dyn StdError + 'static)| (*error).source();
    std::iter::successors(Some(error), next)
}

fn find<T: StdError + 'static>(error: &object_store::Error) -> Option<&T> {
    chain(error).find_map(|link| link.downcast_ref::<T>())
}

/// The error of the last attempt of a change, an earlier one of which was not answered. One that gave up says so itself, and
/// what a store cannot do it has not done.
pub(super) fn unsettled(error: object_store::Error) -> object_store::Error {
    let is_beyond = matches!(
        error,
        object_store::Error::NotSupported { .. } | object_store::Error::NotImplemented { .. }
    );
    match find::<Fault>(&error) {
        Some(Fault::GaveUp { .. } | Fault::Unrepeated { .. }) => error,
        Some(Fault::Service { code, .. }) if code == "NotImplemented" => error,
        _ if is_beyond => error,
        _ => Fault::Unsettled { cause: error }.into(),
    }
}

/// Whether the same request may succeed if it is sent again.
pub(super) fn is_transient(error: &object_store::Error) -> bool {
    if let Some(fault) = find::<Fault>(error) {
        return match fault {
            Fault::Service { status, code, .. } => is_busy(*status, code),
            Fault::Stalled { .. }
            | Fault::Short { .. }
            | Fault::Unfounded { .. }
            | Fault::RootGone
            | Fault::Injected(_) => true,
            Fault::GaveUp { .. }
            | Fault::Unsettled { .. }
            | Fault::Unrepeated { .. }
            | Fault::Credentials { .. }
            | Fault::ReadOnly
            | Fault::Withheld { .. } => false,
        };
    }
    let text = error.to_string();
    if find::<HttpError>(error).is_some() {
        // A wrong certificate stays wrong; where no instance metadata answers, none will.
        return !text.contains(INSTANCE_METADATA) && certificate_refusal(error).is_none();
    }
    if let Some(io) = find::<std::io::Error>(error) {
        return matches!(io.kind(), std::io::ErrorKind::Interrupted | std::io::ErrorKind::TimedOut);
    }
    // Bulk deletes and copies report these inside a reply of status 200.
    let named = |code| code_in(&text) == Some(code) || text.contains(&format!("(code: {code})"));
    ["InternalError", "SlowDown", "ServiceUnavailable", "RequestTimeout"].into_iter().any(named)
}

/// Why the certificate of the server was refused, if it was.
fn certificate_refusal(error: &object_store::Error) -> Option<String> {
    find::<HttpError>(error)?;
    chain(error).map(ToString::to_string).filter(|text| text.contains("certificate")).last()
}

/// Whether who gives this host its credentials was asked without success: a profile's program, a token service, or the
/// cloud's metadata service. Before the first credentials this means that there are none.
pub(super) fn lacks_credentials(error: &object_store::Error) -> bool {
    match find::<Fault>(error) {
        Some(fault) => matches!(fault, Fault::Credentials { .. }),
        None => error.to_string().contains(INSTANCE_METADATA),
    }
}

/// What stores call credentials that they do not take, whatever time they were given for: sessions that are over, and keys that
/// were replaced. The last ones are MinIO's and versitygw's own.
const REFUSALS: [&str; 7] = [
    "ExpiredToken",
    "InvalidToken",
    "TokenRefreshRequired",
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "InvalidTokenId",
    "XAdminUserNotFound",
];

/// Whether a store does not take these credentials, and may take newer ones. A HEAD is answered without a body that would say so:
/// of temporary ones by a status of its own.
pub(super) fn refuses_credentials(error: &object_store::Error, is_head: bool) -> bool {
    let text = error.to_string();
    match service_code(error).or_else(|| code_in(&text)) {
        Some(code) => REFUSALS.contains(&code),
        None => is_head && text.contains("400 Bad Request"),
    }
}

/// Whether a HEAD was denied: because of the key that signed it, of what it may do, or, where it may not list, because there is no
/// such object.
pub(super) fn is_denied_head(error: &object_store::Error) -> bool {
    use object_store::Error as Store;
    matches!(error, Store::PermissionDenied { .. } | Store::Unauthenticated { .. })
}

/// How long nothing had moved, in milliseconds, where that is what ended an attempt.
pub(super) fn stalled_ms(error: &object_store::Error) -> Option<u64> {
    match find::<Fault>(error) {
        Some(Fault::Stalled { waited_ms }) => Some(*waited_ms),
        _ => None,
    }
}

/// Whether a request that failed for now may have been carried out: it was sent, and the store did not put it off.
pub(super) fn is_unanswered(error: &object_store::Error) -> bool {
    let is_later = matches!(find::<Fault>(error), Some(Fault::Service { status: 408 | 409 | 429 | 503, .. }));
    !is_later && !is_unreachable(error) && !lacks_credentials(error)
}

/// Whether a store asks for fewer requests; one that is away, behind something that answers for it, does not.
pub(super) fn is_put_off(error: &object_store::Error) -> bool {
    match find::<Fault>(error) {
        Some(Fault::Service { status, code, .. }) => {
            *status == 429 || matches!(code.as_str(), "SlowDown" | "ServerBusy" | "TooManyRequests")
        }
        _ => false,
    }
}

/// Whether nobody took a connection.
pub(super) fn is_unreachable(error: &object_store::Error) -> bool {
    find::<HttpError>(error).is_some_and(|error| error.kind() == HttpErrorKind::Connect)
}

/// Whether a service's answer means "later", not "no".
pub(super) fn is_busy(status: u16, code: &str) -> bool {
    match status {
        408 | 429 => true,
        // Two conditional writes at once: the store asks for the loser to try again.
        409 => matches!(code, "ConditionalRequestConflict" | "OperationAborted"),
        501 | 505 => false,
        500.. => true,
        _ => matches!(code, "SlowDown" | "RequestTimeout" | "InternalError" | "ServiceUnavailable"),
    }
}

/// Whether an error says that a condition did not hold, or that what it was about is gone.
pub(super) fn is_refusal(error: &object_store::Error) -> bool {
    use object_store::Error as Store;
    matches!(error, Store::AlreadyExists { .. } | Store::Precondition { .. } | Store::NotFound { .. })
}

/// Whether this host's kernel said it, of a folder: it is never mistaken, and a directory may be in the way that is no object.
pub(super) fn is_of_kernel(error: &object_store::Error) -> bool {
    find::<std::io::Error>(error).is_some() && find::<HttpError>(error).is_none()
}

/// What a service calls its error, where it was asked from here.
pub(super) fn service_code(error: &object_store::Error) -> Option<&str> {
    find::<Fault>(error).and_then(|fault| match fault {
        Fault::Service { code, .. } => Some(code.as_str()),
        _ => None,
    })
}

/// Whether a store does not make an object of the parts that it was given.
pub(super) fn is_about_parts(error: &object_store::Error) -> bool {
    service_code(error) == Some("InvalidPart")
}

/// The text between `<Code>` and its end tag in a service's XML answer.
fn code_in(text: &str) -> Option<&str> {
    between(text, "Code")
}

fn between<'a>(text: &'a str, tag: &str) -> Option<&'a str> {
    let (_, rest) = text.split_once(&format!("<{tag}>"))?;
    rest.split_once(&format!("</{tag}>")).map(|(inside, _)| inside)
}

/// Whether a change of the bucket was never sent, as this process may make none now: see [`super::Bucket::guarded`].
pub fn is_withheld(error: &Error) -> bool {
    let source = error.source().and_then(|source| source.downcast_ref());
    source.and_then(find::<Fault>).is_some_and(|fault| matches!(fault, Fault::Withheld { .. }))
}

/// Whether a change of the bucket was not answered, and not sent again: see [`super::Bucket::delete_many_once`].
pub fn is_unrepeated(error: &Error) -> bool {
    let source = error.source().and_then(|source| source.downcast_ref());
    source.and_then(find::<Fault>).is_some_and(|fault| matches!(fault, Fault::Unrepeated { .. }))
}

/// The error as it crosses the package's boundary. `bucket` names the bucket in messages.
pub(super) fn convert(bucket: &str, error: object_store::Error) -> Error {
    explain(bucket, &error)
        .unwrap_or_else(|| by_variant(bucket, &error, &error.to_string()).with_source(error))
}

/// The same where all that is known is said: what lies below would only say it again.
fn explain(bucket: &str, error: &object_store::Error) -> Option<Error> {
    if let Some(Fault::Unsettled { cause }) = find::<Fault>(error) {
        let told = explain(bucket, cause);
        let told = told.unwrap_or_else(|| by_variant(bucket, cause, &cause.to_string()));
        return Some(
            unanswered(told).context("what became of an earlier attempt is not known; the last one"),
        );
    }
    if let Some(error) = no_credentials(bucket, error) {
        return Some(error);
    }
    let text = error.to_string();
    let service = find::<Fault>(error).and_then(|fault| match fault {
        Fault::Service { code, message, .. } => Some((code.clone(), message.clone())),
        Fault::GaveUp { cause, .. } => find::<Fault>(cause).and_then(|fault| match fault {
            Fault::Service { code, message, .. } => Some((code.clone(), message.clone())),
            _ => None,
        }),
        _ => None,
    });
    let code = service.as_ref().map(|(code, _)| code.as_str()).or_else(|| code_in(&text)).unwrap_or("");
    let said = service.as_ref().map(|(_, message)| message.as_str()).or_else(|| between(&text, "Message"));
    let said = said.unwrap_or("no reason given");
    let known = match code {
        "" => None,
        "InvalidObjectState" | "ObjectNotInActiveTierError" => Some(archived(bucket, error, &text)),
        code => by_code(bucket, code, said).or_else(|| by_refusal(bucket, code, said)),
    };
    let has_given_up = matches!(find::<Fault>(error), Some(Fault::GaveUp { .. }));
    known
        .map(|known| if has_given_up { unanswered(known) } else { known })
        .or_else(|| gave_up(bucket, error))
        .or_else(|| by_kernel(bucket, error))
}

/// The same cause and hint, of what may nevertheless have been carried out: the caller finds out later.
fn unanswered(told: Error) -> Error {
    let error = Error::new(ErrorKind::Unavailable, told.message());
    match told.hint() {
        Some(hint) => error.with_hint(hint),
        None => error,
    }
}

/// Nobody gave any. Where there were some before, they were asked for as long as the store may be.
fn no_credentials(bucket: &str, error: &object_store::Error) -> Option<Error> {
    let (fault, tries) = match find::<Fault>(error)? {
        Fault::GaveUp { attempts, waited_ms, cause } => (find::<Fault>(cause)?, Some((attempts, waited_ms))),
        fault => (fault, None),
    };
    let Fault::Credentials { origin, cause, hint } = fault else { return None };
    let none = format!("no credentials for {bucket} from {origin}");
    let error = match tries {
        None => Error::new(ErrorKind::Denied, format!("{none}: {cause}")),
        Some((attempts, waited_ms)) => {
            let message =
                format!("{none}: gave up after {attempts} attempts in {waited_ms} ms; the last: {cause}");
            Error::new(ErrorKind::Unavailable, message)
        }
    };
    Some(error.with_hint(hint))
}

/// What object_store says of one key of two, and the variable that it lacks.
const MISSING_KEYS: [(&str, &str); 2] =
    [("Missing SecretAccessKey", "AWS_SECRET_ACCESS_KEY"), ("Missing AccessKeyId", "AWS_ACCESS_KEY_ID")];

/// The store was asked for as long as it may be.
fn gave_up(bucket: &str, error: &object_store::Error) -> Option<Error> {
    let Some(Fault::GaveUp { attempts, waited_ms, cause }) = find::<Fault>(error) else { return None };
    // The layers of a client repeat one another; the lowest knows what happened.
    let said = chain(cause).last().map(ToString::to_string).unwrap_or_default();
    let no_tls = said.contains("InvalidContentType") || said.contains("corrupt message");
    let is_busy = ["SlowDown", "429 Too Many Requests", "503 "].iter().any(|word| said.contains(word));
    let is_gone = matches!(find::<Fault>(cause), Some(Fault::RootGone));
    let hint = match (no_tls, is_busy) {
        _ if is_gone => "move it back, or mount again what it lies on",
        (true, _) => "the server does not speak TLS there: does AWS_ENDPOINT_URL have to begin with http://?",
        (false, true) => {
            "the store asks for fewer requests, of all clients together: fewer at a time (store.max_in_flight), keys under more \
             prefixes, or a longer store.deadline_ms"
        }
        (false, false) => unreached(bucket),
    };
    let what = if is_busy { "is too busy" } else { "did not answer" };
    let message =
        format!("{bucket} {what}: gave up after {attempts} attempts in {waited_ms} ms; the last: {said}");
    Some(Error::new(ErrorKind::Unavailable, message).with_hint(hint))
}

/// What to look at where a store is not heard of.
fn unreached(bucket: &str) -> &'static str {
    match bucket.split_once("://") {
        Some(("file", _)) => {
            "the disk that holds the directory, or the server that it is mounted from, hangs or is too slow: `dmesg` and \
             `iostat -x 1` may show it; a longer store.deadline_ms waits longer"
        }
        Some(("gs" | "az", _)) => "is the endpoint up and reachable from here? check the network",
        _ => "is the endpoint up and reachable from here? check AWS_ENDPOINT_URL and the network",
    }
}

/// Errors that S3 names. The hint says what to change.
fn by_code(bucket: &str, code: &str, said: &str) -> Option<Error> {
    let (kind, message, hint) = match code {
        "NoSuchBucket" => (
            ErrorKind::NotFound,
            format!("bucket {bucket} does not exist"),
            "create it, or check its name, the region and AWS_ENDPOINT_URL",
        ),
        // The last two are MinIO's and versitygw's own.
        "InvalidAccessKeyId"
        | "SignatureDoesNotMatch"
        | "InvalidToken"
        | "InvalidTokenId"
        | "XAdminUserNotFound" => (
            ErrorKind::Denied,
            format!("the store does not accept the credentials for {bucket} ({code}: {said})"),
            "check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN, or AWS_PROFILE",
        ),
        "ExpiredToken" | "TokenRefreshRequired" => (
            ErrorKind::Denied,
            format!("the temporary credentials for {bucket} have expired ({said})"),
            "get new ones: log in again (aws sso login), or write them into the credentials file, which is read anew; those of the \
             environment are read once: mount again",
        ),
        "InvalidBucketName" => (
            ErrorKind::Invalid,
            format!("{bucket} cannot be the name of a bucket ({said})"),
            "bucket names are 3 to 63 lower-case letters, digits, dots and hyphens",
        ),
        // Signatures in the query hold for minutes: that they are over, or not yet begun, is the clock's fault.
        "AccessDenied" if said.contains("has expired") || said.contains("not valid yet") => clock(said),
        "AccessDenied" | "AllAccessDisabled" => (
            ErrorKind::Denied,
            format!("access to {bucket} is denied ({said})"),
            "the credentials are known but lack the permission; listing needs s3:ListBucket, reading s3:GetObject",
        ),
        "AuthorizationHeaderMalformed"
        | "AuthorizationQueryParametersError"
        | "PermanentRedirect"
        | "IllegalLocationConstraintException" => (
            ErrorKind::Invalid,
            format!("{bucket} is in another region ({said})"),
            "set AWS_REGION to the bucket's region",
        ),
        // Alibaba's, Tencent's and Volcengine's names for one thing.
        "SecondLevelDomainForbidden" | "PathStyleDomainForbidden" | "InvalidPathAccess" => (
            ErrorKind::Invalid,
            format!("the store of {bucket} wants the bucket in the name of its host ({code}: {said})"),
            "set AWS_VIRTUAL_HOSTED_STYLE_REQUEST=true; AWS_ENDPOINT_URL stays the store's own",
        ),
        "RequestTimeTooSkewed" => clock(said),
        "KeyTooLongError" => (
            ErrorKind::Invalid,
            format!("a key in {bucket} would be too long ({said})"),
            "keys have at most 1,024 bytes, the prefix of the URL included: choose a shorter one",
        ),
        "NotImplemented" => (
            ErrorKind::Unsupported,
            format!("the store of {bucket} does not implement this ({said})"),
            "run `forebay doctor` to see what it supports",
        ),
        _ => return None,
    };
    Some(Error::new(kind, message).with_hint(hint))
}

/// What S3's errors name that will not pass, whatever is tried again: of uploads in parts, of sizes, of what the store does not
/// take at all.
fn by_refusal(bucket: &str, code: &str, said: &str) -> Option<Error> {
    let (kind, hint) = match code {
        "InvalidPart" | "InvalidPartOrder" | "EntityTooSmall" => (
            ErrorKind::Refused,
            "the store did not take the object in these parts; if it wants all but the last of one size, set even_parts of \
             [volume.store]",
        ),
        "EntityTooLarge" => {
            (ErrorKind::TooLarge, "the store keeps no object, or takes no part, of this size")
        }
        "InvalidStorageClass" => (
            ErrorKind::Refused,
            "the store has no such storage class: `storage_class` of [volume.store], or AWS_STORAGE_CLASS, names it",
        ),
        "InvalidRequest"
        | "InvalidArgument"
        | "InvalidEncryptionAlgorithmError"
        | "MalformedXML"
        | "MetadataTooLarge" => (
            ErrorKind::Refused,
            "`forebay doctor` shows what the store supports; if options were set for it, as of encryption or checksums, check those",
        ),
        _ => return None,
    };
    Some(
        Error::new(kind, format!("{bucket} does not take this, now or later ({code}: {said})"))
            .with_hint(hint),
    )
}

/// An object that is there and has to be restored before it can be read.
fn archived(bucket: &str, error: &object_store::Error, text: &str) -> Error {
    let class =
        between(text, "StorageClass").map(|class| format!(" (storage class {class})")).unwrap_or_default();
    // Of what is asked for from here, as of copies, the path is another one.
    let message = match error {
        object_store::Error::PermissionDenied { path, .. } if service_code(error).is_none() => {
            format!("{path} in {bucket} is archived{class}")
        }
        object_store::Error::PermissionDenied { path, .. } => {
            format!("an object is archived that {path} in {bucket} is to be made of")
        }
        _ => format!("an object in {bucket} is archived{class}"),
    };
    Error::new(ErrorKind::Refused, message)
        .with_hint("restore it (aws s3api restore-object), which takes minutes to hours, then read it again")
}

fn clock(said: &str) -> (ErrorKind, String, &'static str) {
    let message = format!("the store refuses requests signed by this machine's clock ({said})");
    (ErrorKind::Denied, message, "set the machine's clock")
}

/// What to do where nobody gives credentials.
fn without_credentials(bucket: &str) -> &'static str {
    match bucket.split_once("://") {
        Some(("gs", _)) => {
            "set GOOGLE_APPLICATION_CREDENTIALS, or log in: gcloud auth application-default login; a bucket that anybody may \
                 read needs none with --anonymous (GOOGLE_SKIP_SIGNATURE=true)"
        }
        Some(("az", _)) => {
            "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY; a container that anybody may read needs no key with \
                 --anonymous (AZURE_SKIP_SIGNATURE=true)"
        }
        _ => {
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; a bucket that anybody may read needs none with \
                 --anonymous (AWS_SKIP_SIGNATURE=true)"
        }
    }
}

fn by_variant(bucket: &str, error: &object_store::Error, text: &str) -> Error {
    use object_store::Error as Store;
    if text.contains(INSTANCE_METADATA) {
        let hint = without_credentials(bucket);
        return Error::new(ErrorKind::Denied, format!("no credentials found for {bucket}")).with_hint(hint);
    }
    if let Some(reason) = certificate_refusal(error) {
        let message = format!("the certificate of the server of {bucket} is not trusted: {reason}");
        return Error::new(ErrorKind::Unavailable, message)
            .with_hint("SSL_CERT_FILE or AWS_CA_BUNDLE names a file of authorities to trust; is the endpoint named as in the certificate?");
    }
    if let Some(Fault::Unrepeated { cause }) = find::<Fault>(error) {
        let said = chain(cause).last().map(ToString::to_string).unwrap_or_default();
        let message = format!("{bucket} did not answer a request that is not to be sent twice: {said}");
        return Error::new(ErrorKind::Unavailable, message).with_hint(unreached(bucket));
    }
    if let Some(Fault::ReadOnly) = find::<Fault>(error) {
        return Error::new(ErrorKind::ReadOnly, format!("{bucket} is open read-only"));
    }
    // Each store has its own error for this, and none has a type.
    if text.contains("Wanted range starting at") || text.contains("416 Range Not Satisfiable") {
        return Error::invalid(format!("a range past the end of an object in {bucket} was asked for"));
    }
    if text.contains("redirect without LOCATION") {
        return Error::new(ErrorKind::Invalid, format!("{bucket} is in another region"))
            .with_hint("set AWS_REGION to the bucket's region");
    }
    if matches!(error, Store::NotFound { path, .. } if path.is_empty()) {
        return Error::new(ErrorKind::NotFound, format!("the endpoint knows nothing of {bucket}"))
            .with_hint("check its name; AWS_ENDPOINT_URL names the server, without a bucket or a path");
    }
    // The client's own words, before it asks anybody.
    let said = error.to_string();
    if let Some(name) = MISSING_KEYS.into_iter().find(|(words, _)| said.contains(words)).map(|(_, name)| name)
    {
        return Error::new(
            ErrorKind::Denied,
            format!("the credentials for {bucket} are incomplete: {name} is not set"),
        )
        .with_hint("set both AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or neither and AWS_PROFILE");
    }
    let (kind, message) = match error {
        Store::NotFound { path, .. } => (ErrorKind::NotFound, format!("no object {path} in {bucket}")),
        Store::AlreadyExists { path, .. } => {
            (ErrorKind::Conflict, format!("{path} exists already in {bucket}"))
        }
        Store::Precondition { path, .. } => (ErrorKind::Conflict, format!("{path} in {bucket} was changed")),
        Store::NotSupported { .. } | Store::NotImplemented { .. } => {
            (ErrorKind::Unsupported, format!("the store of {bucket} cannot do this"))
        }
        Store::InvalidPath { .. } | Store::UnknownConfigurationKey { .. } => {
            (ErrorKind::Invalid, format!("bad request to {bucket}"))
        }
        Store::PermissionDenied { path, .. } | Store::Unauthenticated { path, .. } => {
            (ErrorKind::Denied, format!("access to {path} in {bucket} is denied"))
        }
        _ => (ErrorKind::Unavailable, format!("{bucket} failed")),
    };
    Error::new(kind, message)
}

/// What this host's kernel said of a folder and of what lies in it. That a name is there or not is the caller's to tell.
fn by_kernel(bucket: &str, error: &object_store::Error) -> Option<Error> {
    use std::io::ErrorKind as Io;
    // Of other stores it is about a file with credentials, which object_store names.
    let is_folder = bucket.starts_with("file:");
    let io =
        find::<std::io::Error>(error).filter(|_| is_folder && is_of_kernel(error) && !is_refusal(error))?;
    let place = match error {
        object_store::Error::PermissionDenied { path, .. } if !path.is_empty() => {
            format!("{path} in {bucket}")
        }
        _ => bucket.to_owned(),
    };
    let failure = Error::new(Error::from(std::io::Error::from(io.kind())).kind(), format!("{place}: {io}"));
    Some(match io.kind() {
        Io::PermissionDenied => failure.with_hint(
            "whoever runs this has to be allowed to list, read and write the directory: compare `id` and `ls -ld`",
        ),
        Io::ReadOnlyFilesystem => {
            failure.with_hint("the file system that holds it is mounted read-only: `findmnt -T` shows it")
        }
        Io::StorageFull | Io::QuotaExceeded => {
            failure.with_hint("make room on the file system that holds it: `df -h` and `df -i` show what there is")
        }
        _ => failure,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn service(status: u16, code: &str) -> object_store::Error {
        Fault::Service { status, code: code.into(), message: "why".into() }.into()
    }

    #[test]
    fn only_errors_that_may_pass_are_retried() {
        for error in [
            service(500, "InternalError"),
            service(503, "SlowDown"),
            service(429, ""),
            service(409, "ConditionalRequestConflict"),
            Fault::Stalled { waited_ms: 1 }.into(),
            Fault::Short { missing: 1 }.into(),
        ] {
            assert!(is_transient(&error), "{error}");
        }
        for error in [
            service(501, "NotImplemented"),
            service(403, "AccessDenied"),
            service(409, "BucketAlreadyExists"),
            Fault::ReadOnly.into(),
            unsupported("x"),
        ] {
            assert!(!is_transient(&error), "{error}");
        }
    }

    #[test]
    fn a_key_without_its_other_half_is_named() {
        let client = |keys: &[(object_store::aws::AmazonS3ConfigKey, &str)]| {
            let builder = object_store::aws::AmazonS3Builder::new().with_bucket_name("b").with_region("r");
            let builder =
                keys.iter().fold(builder, |builder, (key, value)| builder.with_config(*key, *value));
            convert("s3://b", builder.build().expect_err("one half"))
        };
        use object_store::aws::AmazonS3ConfigKey::{AccessKeyId, SecretAccessKey};
        for (given, missing) in
            [(AccessKeyId, "AWS_SECRET_ACCESS_KEY"), (SecretAccessKey, "AWS_ACCESS_KEY_ID")]
        {
            let error = client(&[(given, "x")]);
            assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
            assert!(error.message().contains(&format!("{missing} is not set")), "{error}");
            assert!(error.hint().expect("a hint").contains("AWS_PROFILE"), "{error}");
        }
    }

    #[test]
    fn what_the_kernel_says_of_a_folder_is_said_once_with_its_place() {
        let io = |raw: i32| std::io::Error::from_raw_os_error(raw);
        let denied = |path: &str| object_store::Error::PermissionDenied {
            path: path.into(),
            source: io(libc::EACCES).into(),
        };
        let generic = |raw| object_store::Error::Generic { store: STORE, source: io(raw).into() };
        for (error, kind, text, hint) in [
            (denied(""), ErrorKind::Denied, "file:///d: Permission denied (os error 13)", Some("ls -ld")),
            (
                denied("a/b"),
                ErrorKind::Denied,
                "a/b in file:///d: Permission denied (os error 13)",
                Some("ls -ld"),
            ),
            (
                generic(libc::EROFS),
                ErrorKind::ReadOnly,
                "file:///d: Read-only file system (os error 30)",
                Some("findmnt"),
            ),
            (
                generic(libc::ENOSPC),
                ErrorKind::NoSpace,
                "file:///d: No space left on device (os error 28)",
                Some("df -h"),
            ),
            (generic(libc::EIO), ErrorKind::Unavailable, "file:///d: Input/output error (os error 5)", None),
        ] {
            let error = convert("file:///d", error);
            assert_eq!((error.kind(), error.to_string().as_str()), (kind, text));
            assert_eq!(error.hint().is_some(), hint.is_some(), "{error}");
            assert!(hint.is_none_or(|hint| error.hint().is_some_and(|said| said.contains(hint))), "{error}");
        }
        let file = format!("no key in /k.json: {}", io(libc::EACCES));
        let key = object_store::Error::Generic { store: "GCS", source: std::io::Error::other(file).into() };
        let told = convert("gs://b", key);
        assert!(told.to_string().contains("/k.json") && told.hint().is_none(), "{told}");
        let gone = object_store::Error::NotFound { path: "a".into(), source: io(libc::ENOENT).into() };
        assert_eq!(convert("file:///d", gone).message(), "no object a in file:///d");
    }

    #[test]
    fn people_get_cause_and_hint() {
        let check = |error: object_store::Error, kind, says: &str| {
            let error = convert("s3://b", error);
            assert_eq!(error.kind(), kind, "{error}");
            assert!(error.message().contains(says), "{error}");
            assert!(error.hint().is_some(), "{error}");
        };
        check(service(404, "NoSuchBucket"), ErrorKind::NotFound, "bucket s3://b does not exist");
        check(service(403, "InvalidAccessKeyId"), ErrorKind::Denied, "InvalidAccessKeyId");
        for code in ["AuthorizationHeaderMalformed", "AuthorizationQueryParametersError"] {
            check(service(400, code), ErrorKind::Invalid, "another region");
        }
        check(service(400, "ExpiredToken"), ErrorKind::Denied, "have expired");
        check(service(400, "InvalidBucketName"), ErrorKind::Invalid, "cannot be the name");
        check(service(400, "KeyTooLongError"), ErrorKind::Invalid, "too long");
        check(service(403, "RequestTimeTooSkewed"), ErrorKind::Denied, "clock");
        for message in ["Request has expired", "Request is not valid yet"] {
            let fault = Fault::Service { status: 403, code: "AccessDenied".into(), message: message.into() };
            check(fault.into(), ErrorKind::Denied, "clock");
        }
        let nothing = object_store::Error::NotFound { path: String::new(), source: "why".into() };
        check(nothing, ErrorKind::NotFound, "knows nothing of s3://b");
        let cause = service(503, "SlowDown");
        check(
            Fault::GaveUp { attempts: 3, waited_ms: 9, cause }.into(),
            ErrorKind::Unavailable,
            "gave up after 3 attempts",
        );
        let refused = object_store::Error::Generic { store: STORE, source: "connection refused".into() };
        let told = convert("s3://b", Fault::GaveUp { attempts: 3, waited_ms: 9, cause: refused }.into());
        let text = "s3://b did not answer: gave up after 3 attempts in 9 ms; the last: connection refused";
        assert_eq!(told.to_string(), text);
    }

    /// A seal that the store refused for good was tried for ever, and an archived object was a matter of permissions.
    #[test]
    fn what_a_store_refuses_for_good_is_no_outage() {
        for code in [
            "InvalidPart",
            "InvalidPartOrder",
            "EntityTooSmall",
            "InvalidRequest",
            "InvalidArgument",
            "MalformedXML",
        ] {
            let told = convert("s3://b", service(400, code));
            assert_eq!(told.kind(), ErrorKind::Refused, "{told}");
            assert!(told.message().contains(code) && told.hint().is_some(), "{told}");
        }
        assert_eq!(convert("s3://b", service(400, "EntityTooLarge")).kind(), ErrorKind::TooLarge);
        let cause = service(400, "InvalidPart");
        let unsettled = convert("s3://b", unsettled(cause));
        assert_eq!(unsettled.kind(), ErrorKind::Unavailable, "an earlier attempt may have come");
    }

    #[test]
    fn an_archived_object_is_named_with_its_storage_class() {
        let body = "<Error><Code>InvalidObjectState</Code><Message>The operation is not valid for the object's storage \
            class</Message><StorageClass>DEEP_ARCHIVE</StorageClass></Error>";
        let path = "a/b".to_owned();
        let told = convert("s3://b", object_store::Error::PermissionDenied { path, source: body.into() });
        assert_eq!(told.kind(), ErrorKind::Refused);
        assert_eq!(told.message(), "a/b in s3://b is archived (storage class DEEP_ARCHIVE)");
        assert!(told.hint().is_some_and(|hint| hint.contains("restore-object")), "{told}");
        // As it is said of a copy, which is asked for from here.
        let source = Box::new(Fault::Service {
            status: 403,
            code: "InvalidObjectState".into(),
            message: "why".into(),
        });
        let told = convert("s3://b", object_store::Error::PermissionDenied { path: "c".into(), source });
        assert_eq!(told.message(), "an object is archived that c in s3://b is to be made of");
    }

    #[test]
    fn a_store_that_wants_the_bucket_in_its_host_name_is_no_matter_of_permissions() {
        for code in ["SecondLevelDomainForbidden", "PathStyleDomainForbidden"] {
            let told = convert("s3://b", service(403, code));
            assert_eq!(told.kind(), ErrorKind::Invalid, "{told}");
            let hint = told.hint().expect("a hint");
            assert!(hint.contains("AWS_VIRTUAL_HOSTED_STYLE_REQUEST=true"), "{hint}");
        }
    }

    /// Whose folder was on a slow disk was sent to look at AWS_ENDPOINT_URL.
    #[test]
    fn the_hint_of_what_did_not_answer_is_about_the_store_that_it_is() {
        for (bucket, hint) in [
            ("s3://b", "AWS_ENDPOINT_URL"),
            ("gs://b", "reachable from here"),
            ("az://b", "reachable from here"),
            ("file:///d", "the disk"),
        ] {
            let cause = Fault::Stalled { waited_ms: 10_000 }.into();
            let told = convert(bucket, Fault::GaveUp { attempts: 3, waited_ms: 30_000, cause }.into());
            let said = told.hint().expect("a hint");
            assert!(said.contains(hint), "{bucket}: {said}");
            assert_eq!(said.contains("AWS_"), bucket.starts_with("s3:"), "{bucket}: {said}");
        }
    }

    #[test]
    fn what_is_not_sent_again_is_told_with_its_cause() {
        let told =
            convert("s3://b", Fault::Unrepeated { cause: Fault::Stalled { waited_ms: 7 }.into() }.into());
        assert!(told.message().contains("no answer within 7 ms"), "{told}");
        assert_eq!((told.kind(), is_unrepeated(&told)), (ErrorKind::Unavailable, true));
        assert!(!is_unrepeated(&convert("s3://b", Fault::Stalled { waited_ms: 7 }.into())));
    }

    #[test]
    fn what_a_store_cannot_do_it_has_not_done() {
        let kind = |error| convert("s3://b", unsettled(error)).kind();
        assert_eq!(kind(service(501, "NotImplemented")), ErrorKind::Unsupported);
        assert_eq!(kind(service(403, "AccessDenied")), ErrorKind::Unavailable);
        let cause = Fault::Stalled { waited_ms: 1 }.into();
        let told = convert("s3://b", unsettled(Fault::GaveUp { attempts: 3, waited_ms: 9, cause }.into()));
        assert!(!told.message().contains("earlier attempt"), "it says so itself: {told}");
    }
}
