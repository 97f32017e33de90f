//! Sends requests again that may succeed the next time, until a deadline.
//!
//! The wait doubles from 50 ms to 5 s, each drawn from its upper half. The deadline counts from the first failure of
//! a request, so that a large transfer that works is never cut; of one that stood still, from when it began to. A body that breaks is resumed where it stopped, from
//! the same version of the object or not at all, with a new deadline after each byte of progress.
//!
//! **A conditional write whose reply was lost** may have been carried out, and then its repetition is refused. So
//! every such write, and every upload in parts, carries a random token as user metadata (`forebaywrite`), and a
//! refusal after a lost reply is settled by one HEAD: if the object has the token, the write is ours and succeeded.
//! Otherwise, and where a store keeps no user metadata, the refusal stands (`Conflict`): the caller reads the key
//! again and finds whatever is there, its own bytes included.
//!
//! **A refusal that has no ground** is not believed either: something between here and the store repeats requests on its
//! own, or the store was wrong for a moment. Each request that was refused for its condition is followed by that HEAD,
//! replies lost or not: if the object has the token, the write succeeded; if what the condition asks for is there, the
//! request is sent again; otherwise the refusal stands.
//!
//! **An error after a lost reply**, such as a denial because a token ran out between the two, answers the last attempt alone.
//! Of a request that changes what keys hold it is told as its cause, but as unanswered ([`Fault::Unsettled`]).
//!
//! **What others may have put there meanwhile** is nobody's to delete: a deletion that is to be sent once ends with the attempt
//! that was not answered ([`Fault::Unrepeated`]), and who asked for it looks anew.
//!
//! **An answer with another version** than a read asked for is such a refusal: there are stores, and things on the way to
//! them, that look at no condition of a read.
//!
//! **An upload whose beginning went unanswered** may go on beside the one that a repetition began: [`Unanswered`] is told.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::StreamExt;
use object_store::{Attribute, GetOptions, GetRange, GetResult, GetResultPayload, PutResult, Result};
use tokio::time::Instant;

use super::body::{Body, replace};
use crate::object::counters::Meter;
use crate::object::error::{
    Fault, is_of_kernel, is_refusal, is_transient, is_unanswered, is_unreachable, lacks_credentials,
    stalled_ms, unsettled,
};
use crate::object::request::{Reply, Request, Service, Shared};
use crate::object::types::Condition;
use crate::object::unanswered::Unanswered;
use crate::rng::Rng;

/// The name of the user metadata that holds a write's token. Letters only: Azure allows nothing else.
pub(in crate::object) const TOKEN_ATTRIBUTE: &str = "forebaywrite";

const FIRST_WAIT_MS: u64 = 50;
const LONGEST_WAIT_MS: u64 = 5_000;
/// How often a refusal is not believed. A store that goes on like that does not understand conditions.
const MOST_UNFOUNDED: u64 = 6;

/// The decorator; its state is shared with the bodies that it watches.
#[derive(Debug)]
pub(in crate::object) struct Retry(pub(in crate::object) Arc<Retrying>);

/// What retrying needs.
#[derive(Debug)]
pub(in crate::object) struct Retrying {
    pub(in crate::object) next: Shared,
    pub(in crate::object) deadline_ms: u64,
    /// The deadline while nobody takes a connection.
    pub(in crate::object) unreachable_ms: u64,
    /// Nothing was asked before: it is not known whether there are credentials.
    pub(in crate::object) is_opening: bool,
    pub(in crate::object) rng: Rng,
    pub(in crate::object) meter: Arc<Meter>,
    pub(in crate::object) unanswered: Arc<Unanswered>,
}

/// One request's failures so far.
#[derive(Default)]
struct Attempts {
    since: Option<Instant>,
    failed: u64,
}

/// What became of attempts at a request that was sent again.
#[derive(Debug, Clone, Copy, Default)]
struct Past {
    /// One failed, in whatever way.
    failed: bool,
    /// One was sent and not put off: the store may have carried it out, or still may.
    unanswered: bool,
}

impl Past {
    fn and(self, other: Self) -> Self {
        Self { failed: self.failed || other.failed, unanswered: self.unanswered || other.unanswered }
    }
}

/// What a look at the store says of a refusal.
enum Finding {
    /// The write had succeeded.
    Done(Reply),
    /// What was asked for holds.
    Unfounded,
    Stands,
}

/// When what failed now had stopped to move: a store that does not answer is away since then. What was given more time than
/// others, for its bytes, is tried as often as those.
fn stood_still_since(cause: &object_store::Error, deadline_ms: u64) -> Instant {
    let (now, stalled_ms) = (Instant::now(), stalled_ms(cause).unwrap_or(0).min(deadline_ms / 3));
    now.checked_sub(Duration::from_millis(stalled_ms)).unwrap_or(now)
}

#[async_trait]
impl Service for Retry {
    async fn call(&self, request: Request) -> Result<Reply> {
        match (self.0.ask(&request).await?, request) {
            (Reply::Object(object), Request::Get { key, options }) if !options.head => {
                let core = self.0.clone();
                let (version, range) = (object.meta.e_tag.clone(), object.range.clone());
                let open = Resume { core, key, options, version, range };
                Ok(Reply::Object(replace(object, |body| open.watch(body))))
            }
            (reply, _) => Ok(reply),
        }
    }
}

impl Retrying {
    /// As [`Self::attempt`]; a refusal is looked into before it counts.
    async fn ask(&self, request: &Request) -> Result<Reply> {
        let (mut unfounded, mut past) = (Attempts::default(), Past::default());
        loop {
            let (done, before) = self.attempt(request).await;
            past = past.and(before);
            let refusal = match done {
                Err(error) if is_refusal(&error) => error,
                Err(error) if past.unanswered && request.changes_keys() => return Err(unsettled(error)),
                done => return done,
            };
            let found = self.settle(request, &refusal, past.failed).await;
            let found = match past.unanswered && request.changes_keys() {
                true => found.map_err(unsettled),
                false => found,
            };
            match found? {
                Finding::Done(reply) => return Ok(reply),
                Finding::Unfounded if unfounded.failed < MOST_UNFOUNDED => {
                    let cause = Fault::Unfounded { cause: refusal.to_string() };
                    // However long a store goes on with it, it is a refusal.
                    if self.back_off(&mut unfounded, cause.into()).await.is_err() {
                        return Err(refusal);
                    }
                }
                Finding::Unfounded | Finding::Stands => return Err(refusal),
            }
        }
    }

    /// Repeats `request` until it succeeds, is refused, or the deadline passes. Says what became of the attempts before the
    /// last one.
    async fn attempt(&self, request: &Request) -> (Result<Reply>, Past) {
        let (mut attempts, mut past) = (Attempts::default(), Past::default());
        loop {
            let sent = Instant::now();
            let error = match self.send(request).await {
                Err(error) if self.may_pass(&error) => error,
                done => return (done, past),
            };
            let unanswered = is_unanswered(&error);
            if unanswered && request.is_sent_once() {
                return (Err(Fault::Unrepeated { cause: error }.into()), past);
            }
            past = past.and(Past { failed: true, unanswered });
            if let Request::Create { key, .. } = request
                && unanswered
            {
                self.unanswered.note(key, sent);
            }
            if let Err(error) = self.back_off(&mut attempts, error).await {
                return (Err(error), past);
            }
        }
    }

    /// Sends a request once. An object of another version than the one that was asked for is refused here, where the store
    /// did not.
    async fn send(&self, request: &Request) -> Result<Reply> {
        let reply = self.next.call(request.clone()).await?;
        if let (Request::Get { key, options }, Reply::Object(GetResult { meta, .. })) = (request, &reply)
            && let (Some(wanted), Some(found)) = (&options.if_match, &meta.e_tag)
            && !is_version(wanted, found)
        {
            let source = format!("asked for {wanted}, answered with {found}").into();
            return Err(object_store::Error::Precondition { path: key.to_string(), source });
        }
        Ok(reply)
    }

    /// Whether the same request may succeed if it is sent again.
    fn may_pass(&self, error: &object_store::Error) -> bool {
        is_transient(error) || (!self.is_opening && lacks_credentials(error))
    }

    /// Waits before the next attempt, or gives up.
    async fn back_off(&self, attempts: &mut Attempts, cause: object_store::Error) -> Result<()> {
        let since = *attempts.since.get_or_insert_with(|| stood_still_since(&cause, self.deadline_ms));
        attempts.failed += 1;
        let longest_ms = FIRST_WAIT_MS << (attempts.failed - 1).min(20);
        let longest_ms = longest_ms.min(LONGEST_WAIT_MS);
        let wait = Duration::from_millis(longest_ms / 2 + self.rng.below(longest_ms / 2 + 1));
        let deadline_ms = match is_unreachable(&cause) {
            true => self.unreachable_ms.min(self.deadline_ms),
            false => self.deadline_ms,
        };
        if since.elapsed() + wait > Duration::from_millis(deadline_ms) {
            let waited_ms = since.elapsed().as_millis() as u64;
            tracing::warn!(attempts = attempts.failed, waited_ms, %cause, "gave up on the store");
            return Err(Fault::GaveUp { attempts: attempts.failed, waited_ms, cause }.into());
        }
        self.meter.retry();
        tracing::debug!(attempt = attempts.failed, wait_ms = wait.as_millis() as u64, %cause, "retrying");
        tokio::time::sleep(wait).await;
        Ok(())
    }

    /// Looks whether a refused write is refused because it succeeded before, and whether what it was refused for holds.
    /// `doubtful` says whether a reply was lost before.
    async fn settle(
        &self,
        request: &Request,
        refusal: &object_store::Error,
        doubtful: bool,
    ) -> Result<Finding> {
        if matches!(request, Request::Abort { .. }) && doubtful {
            return Ok(Finding::Done(Reply::Done));
        }
        // A read of what is another version than one that is known has no condition that could fail (RFC 9110, 13.1.2).
        if let Request::Get { options, .. } = request
            && matches!(refusal, object_store::Error::Precondition { .. })
            && options.if_match.is_none()
            && options.if_none_match.is_some()
        {
            return Ok(Finding::Unfounded);
        }
        let Some((key, condition)) = request.condition() else { return Ok(Finding::Stands) };
        // An object or upload that is not there is no matter of conditions. But an upload may be gone because it is
        // complete: something on the way sent its completion twice.
        let is_missing = matches!(refusal, object_store::Error::NotFound { .. });
        let is_completion = matches!(request, Request::Complete { .. });
        let can_be_ours = (doubtful || is_completion) && !request.token().is_empty();
        if (is_missing || condition == Condition::Always) && !can_be_ours {
            return Ok(Finding::Stands);
        }
        let head = match self.attempt(&Request::head(key.clone())).await.0 {
            Ok(reply) => Some(reply.object()?),
            Err(object_store::Error::NotFound { .. }) => None,
            // Nothing speaks against the refusal.
            Err(error) if is_refusal(&error) || !doubtful => return Ok(Finding::Stands),
            Err(error) => return Err(error),
        };
        if let Some(head) = head.as_ref().filter(|head| is_written_by(head, request.token())) {
            tracing::info!(%key, "a write whose reply was lost, or that was refused, had succeeded");
            let (e_tag, version) = (head.meta.e_tag.clone(), head.meta.version.clone());
            let put = PutResult { e_tag, version, extensions: Default::default() };
            return Ok(Finding::Done(Reply::Put(put)));
        }
        let found = head.as_ref().and_then(|head| head.meta.e_tag.as_deref());
        let holds = match &condition {
            Condition::IfAbsent => head.is_none(),
            Condition::IfVersion(version) => found.is_some_and(|found| is_version(version.as_str(), found)),
            // An unconditional completion whose upload is gone and whose object is not ours: both may be true only if
            // an outsider came in between, which a caller must treat as a conflict.
            Condition::Always if head.is_some() && doubtful => {
                let source = format!("its upload is gone: {refusal}").into();
                return Err(object_store::Error::Precondition { path: key.to_string(), source });
            }
            Condition::Always => false,
        };
        let is_unfounded = holds && !is_missing && !is_of_kernel(refusal);
        Ok(if is_unfounded { Finding::Unfounded } else { Finding::Stands })
    }
}

/// Whether the ETag `found` is one of those `wanted`, which are listed as in `If-Match`. Answers of one store differ in the
/// quotes around it, and what stands between may have marked it as weak: neither makes it another version.
fn is_version(wanted: &str, found: &str) -> bool {
    fn bare(tag: &str) -> &str {
        let tag = tag.trim();
        tag.strip_prefix("W/").unwrap_or(tag).trim_matches('"')
    }
    wanted == "*" || wanted.split(',').any(|wanted| bare(wanted) == bare(found))
}

/// Whether the write that carried `token` put the object there.
fn is_written_by(head: &GetResult, token: &str) -> bool {
    let held = head.attributes.get(&Attribute::Metadata(TOKEN_ATTRIBUTE.into()));
    !token.is_empty() && held.is_some_and(|held| held.as_ref() == token)
}

/// Where a body stands and how to go on with it.
struct Resume {
    core: Arc<Retrying>,
    key: object_store::path::Path,
    options: GetOptions,
    version: Option<String>,
    /// What is still to come.
    range: std::ops::Range<u64>,
}

impl Resume {
    fn watch(self, body: Body) -> Body {
        let attempts = Attempts::default();
        let watched = futures::stream::unfold(Some((self, body, attempts)), |state| async move {
            let (mut open, mut body, mut attempts) = state?;
            loop {
                let error = match body.next().await {
                    Some(Ok(bytes)) => {
                        open.range.start += bytes.len() as u64;
                        let fresh = Attempts::default();
                        return Some((Ok(bytes), Some((open, body, fresh))));
                    }
                    None if open.range.start >= open.range.end => return None,
                    None => Fault::Short { missing: open.range.end - open.range.start }.into(),
                    Some(Err(error)) if open.core.may_pass(&error) => error,
                    Some(Err(error)) => return Some((Err(error), None)),
                };
                // The broken body gives up its place before the next request asks for one.
                drop(std::mem::replace(&mut body, futures::stream::empty().boxed()));
                match open.again(&mut attempts, error).await {
                    Ok(next) => body = next,
                    Err(error) => return Some((Err(error), None)),
                }
            }
        });
        watched.boxed()
    }

    /// Asks for the rest of the same version.
    async fn again(&self, attempts: &mut Attempts, cause: object_store::Error) -> Result<Body> {
        let Some(version) = &self.version else { return Err(cause) };
        if self.range.start >= self.range.end {
            return Ok(futures::stream::empty().boxed());
        }
        self.core.back_off(attempts, cause).await?;
        let options = GetOptions {
            range: Some(GetRange::Bounded(self.range.clone())),
            if_match: Some(version.clone()),
            ..self.options.clone()
        };
        let request = Request::Get { key: self.key.clone(), options };
        let GetResult { payload, .. } = match self.core.send(&request).await {
            Ok(reply) => reply.object()?,
            // Counted as one more failure by the caller's loop.
            Err(error) if self.core.may_pass(&error) => {
                return Ok(futures::stream::once(async { Err::<Bytes, _>(error) }).boxed());
            }
            Err(error) => match self.core.settle(&request, &error, false).await? {
                Finding::Unfounded => {
                    let error = Fault::Unfounded { cause: error.to_string() }.into();
                    return Ok(futures::stream::once(async { Err(error) }).boxed());
                }
                _ => return Err(error),
            },
        };
        match payload {
            GetResultPayload::Stream(stream) => Ok(stream),
            GetResultPayload::File(..) => unreachable!("the decorators below turn every body into a stream"),
        }
    }
}
