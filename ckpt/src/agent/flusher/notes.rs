//! What saves noted that are over, and how it is taken back: until then it keeps what it names from retention.

use forebay_core::Error;

use super::{Flusher, Progress};
use crate::agent::Reply;
use crate::agent::flush::{Given, Save};
use crate::catalog::{Alive, StepKey, forget_notes};

/// Steps remembered at most; garbage collection takes the notes of older ones.
const MOST_LEFT: usize = 100;

impl Flusher {
    /// Remembers what a rank alone noted of a save that failed, to be taken back with the next commit. Where a commit of
    /// that step was tried, by this save, an earlier one or another agent, it may come about after all, and needs what was noted:
    /// that goes with what was stored, or by garbage collection.
    pub(super) fn leave_notes(&mut self, save: &Save, progress: &Progress) {
        let (None, Some((_, run))) = (&self.hello.member, &self.target) else { return };
        let key = run.save(save.held.seal.step);
        // Another save of that step may have left some.
        self.left.retain(|other| *other != key);
        let is_told = progress.alive.as_ref().is_some_and(Alive::is_told);
        if save.given != Given::First || progress.is_published || progress.may_be_committed {
            push_bounded(&mut self.in_doubt, key);
        } else if (progress.may_be_noted || is_told) && !self.in_doubt.contains(&key) {
            push_bounded(&mut self.left, key);
        }
    }

    /// Takes back what was noted of a step that is committed, and what stayed of earlier ones; of several ranks, the one that
    /// committed it did, unless `stays` says what kept it. The step is there whatever comes of it: that is told once.
    pub(super) async fn take_back(&mut self, step: u64, has_notes: bool, stays: Option<Error>) {
        if let (true, None, Some((_, run))) = (has_notes, &self.hello.member, &self.target) {
            push_bounded(&mut self.left, run.save(step));
        }
        let Some(error) = self.forget_left().await.or(stays) else { return };
        tracing::warn!(step, %error, "what was noted stays, of a step that is saved or of one before it");
        if !std::mem::replace(&mut self.told_of_notes, true) {
            let effect = "what was noted of it keeps what it refers to until a later save or `forebay ckpt gc` takes it";
            let message = format!("step {step} is saved; {effect}: {error}");
            self.trainer.tell(&Reply::Warning { message });
        }
    }

    /// Takes it back at once: where the start is superseded, no later save will.
    pub(super) async fn take_all_back(&mut self) {
        if let Some(error) = self.forget_left().await {
            tracing::warn!(%error, "what was noted stays until garbage is collected");
        }
    }

    /// Gives what kept it.
    async fn forget_left(&mut self) -> Option<Error> {
        let (Some((bucket, _)), false) = (&self.target, self.left.is_empty()) else { return None };
        let stays = forget_notes(bucket, &self.left, 0).await.err();
        if stays.is_none() {
            (self.left, self.told_of_notes) = (Vec::new(), false);
        }
        stays
    }
}

fn push_bounded(steps: &mut Vec<StepKey>, step: StepKey) {
    if steps.len() == MOST_LEFT {
        steps.remove(0);
    }
    steps.push(step);
}
