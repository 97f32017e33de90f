//! A trainer that comes after two killed ones, while the agent of the first still brings a step to the store.

use super::adopt_tests::{place, unattached, wait_for};
use super::tests::{Fixture, PATIENCE, attach, save, settle, snapshot};
use super::*;
use crate::dtype::Dtype;

#[test]
fn memory_is_not_written_while_the_agent_before_the_last_one_reads_it() {
    for goes_on in [true, false] {
        let (mut fixture, place) = (Fixture::new(), place(&format!("before-the-last-{goes_on}")));
        let mut first = unattached(&mut fixture, &place);
        first.set_flush_rate(NonZeroU64::new(8 << 20).expect("some"));
        let agent = attach(&mut first);
        let sealed = save(&mut first, 1, 20 << 20);
        while matches!(sealed.progress(), Progress::Sent) {
            first.take_replies(PATIENCE).expect("replies");
        }
        first.disconnect();
        let mut second = unattached(&mut fixture, &place);
        second.adopt(wait_for(&place), true).expect("adopt");
        let between = attach(&mut second);
        second.disconnect();
        let mut third = unattached(&mut fixture, &place);
        third.adopt(wait_for(&place), goes_on).expect("adopt");
        let own = attach(&mut third);
        between.join().expect("agent").expect("served");
        let begin = |session: &mut Session| {
            let tensor = TensorSpec::whole("t", Dtype::named("uint8").expect("u8"), vec![20 << 20]);
            session.begin(vec![tensor], TextLength::default(), 1, Duration::ZERO).expect("begin")
        };
        let filled = begin(&mut third).expect("the slot that nothing is in");
        assert!(begin(&mut third).is_none(), "the other one is being uploaded");
        assert!(!agent.is_finished(), "unless this test was held up");
        third.abandon(filled);
        assert_eq!(third.take_warnings(), Vec::<String>::new(), "the step is on its way");
        agent.join().expect("agent").expect("served");
        assert_eq!(fixture.load(1, 1), vec![1; 20 << 20]);
        let both = [2, 3].map(|fill| snapshot(&mut third, 20 << 20, fill));
        both.into_iter().for_each(|snapshot| third.abandon(snapshot));
        let newer = save(&mut third, 2, 1000);
        let progress = settle(&mut third, &newer);
        assert!(matches!(progress, Progress::Durable), "{progress:?}");
        third.dismiss();
        own.join().expect("agent").expect("served");
    }
}
