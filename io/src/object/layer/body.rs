//! Replacing the body of a reply, for the decorators that watch, hold or break it.

use bytes::Bytes;
use futures::stream::{BoxStream, StreamExt};
use object_store::{GetResult, GetResultPayload, Result};

use crate::object::request::Reply;

/// The body of a GET.
pub(in crate::object) type Body = BoxStream<'static, Result<Bytes>>;

/// Passes the body of `reply`, if it has one, through `wrap`.
pub(in crate::object) fn map_body(reply: Reply, wrap: impl FnOnce(Body) -> Body) -> Reply {
    match reply {
        Reply::Object(object) => Reply::Object(replace(object, wrap)),
        other => other,
    }
}

/// Passes the body of `object` through `wrap`.
pub(super) fn replace(object: GetResult, wrap: impl FnOnce(Body) -> Body) -> GetResult {
    let GetResult { payload, meta, range, attributes, extensions } = object;
    let bare = GetResult {
        payload,
        meta: meta.clone(),
        range: range.clone(),
        attributes: Default::default(),
        extensions: Default::default(),
    };
    let payload = GetResultPayload::Stream(wrap(bare.into_stream().boxed()));
    GetResult { payload, meta, range, attributes, extensions }
}
