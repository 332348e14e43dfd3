use super::*;
use prost::Message;
use remoe_proto::v1::{Cancel, Failure, Rows, Work};
use remoe_test_support::hostile::Cases;

fn expected() -> RemoteRequirements {
    RemoteRequirements {
        checkpoint: "c".to_owned(),
        dtype: "float32".to_owned(),
        numerics_class: "n".to_owned(),
        hidden_size: 8,
        sets: vec![LayerExperts { layer: 1, experts: vec![2, 3] }],
        trust: None,
    }
}

fn found() -> FunctionDescription {
    FunctionDescription {
        wire_version: WIRE_VERSION,
        checkpoint: "c".to_owned(),
        dtype: "float32".to_owned(),
        numerics_class: "n".to_owned(),
        hidden_size: 8,
        hosted: vec![LayerExperts { layer: 1, experts: vec![1, 2, 3] }],
        ..FunctionDescription::default()
    }
}

#[test]
fn function_needs_only_the_experts_it_must_serve() {
    let mut part = expected();
    part.sets[0].experts = vec![1];
    assert_eq!(check(&part, &found()), Ok(()));
    part.sets.push(LayerExperts { layer: 2, experts: vec![0] });
    assert!(check(&part, &found()).is_err_and(|message| message.contains("expert 0 of layer 2")));
    part.sets.clear();
    assert_eq!(check(&part, &found()), Ok(()));
}

#[test]
fn function_must_match_every_requirement() {
    assert_eq!(check(&expected(), &found()), Ok(()));
    type DescriptionChange = (fn(&mut FunctionDescription), &'static str);
    let changes: [DescriptionChange; 7] = [
        (|f| f.wire_version += 1, "wire version"),
        (|f| f.checkpoint = "d".to_owned(), "checkpoint"),
        (|f| f.dtype = "bfloat16".to_owned(), "dtype"),
        (|f| f.numerics_class = "amx".to_owned(), "numerics class"),
        (|f| f.hidden_size = 9, "hidden size"),
        (|f| f.draining = true, "draining"),
        (|f| f.hosted[0].experts = vec![3], "expert 2 of layer 1"),
    ];
    for (change, named) in changes {
        let mut function = found();
        change(&mut function);
        let message = check(&expected(), &function).err().unwrap_or_default();
        assert!(message.contains(named), "{message:?} should name {named}");
    }
}

fn work(id: u64, rows: usize, experts: usize) -> ForwardRequest {
    let work = Work {
        id,
        rows: vec![0; 16 * rows].into(),
        counts: vec![1; rows],
        experts: vec![0; experts],
        ..Work::default()
    };
    ForwardRequest { body: Some(Body::Work(work)) }
}

fn cancel(id: u64) -> ForwardRequest {
    ForwardRequest { body: Some(Body::Cancel(Cancel { id })) }
}

fn rows(id: u64, bytes: usize) -> ForwardReply {
    let rows = Rows { rows: vec![0; bytes].into(), compute_us: 1 };
    ForwardReply { id, outcome: Some(Outcome::Rows(rows)) }
}

#[test]
fn only_replies_to_sent_messages_are_accepted() {
    let mut in_flight = InFlightMessages::default();
    let refused =
        |in_flight: &mut InFlightMessages, reply| in_flight.check_reply(&reply).err().unwrap_or_default();
    assert!(refused(&mut in_flight, rows(1, 0)).contains("not sent: id 1"));
    (1..=4).for_each(|id| in_flight.record_sent(&work(id, 2, 3)));
    assert_eq!(in_flight.check_reply(&rows(2, 48)), Ok(()));
    assert!(refused(&mut in_flight, rows(2, 48)).contains("not sent: id 2"), "a second answer");
    assert!(refused(&mut in_flight, rows(1, 49)).contains("expected at most 48 bytes, got 49"));
    let failure = Failure { message: "x".repeat(MAX_REFUSAL_BYTES + 1), ..Failure::default() };
    let failure = ForwardReply { id: 3, outcome: Some(Outcome::Failure(failure)) };
    assert!(refused(&mut in_flight, failure).contains("refusal too long"));
    in_flight.record_sent(&cancel(4));
    assert_eq!(
        in_flight.check_reply(&rows(4, 48)),
        Ok(()),
        "it may have been computed before the cancellation"
    );
    assert!(refused(&mut in_flight, rows(4, 48)).contains("not sent: id 4"));
    assert!(in_flight.open.is_empty() && in_flight.cancelled.is_empty());
}

#[test]
fn cancelled_messages_are_bounded() {
    let mut in_flight = InFlightMessages::default();
    for id in 0..10_000 {
        in_flight.record_sent(&work(id, 1, 1));
        in_flight.record_sent(&cancel(id));
        in_flight.record_sent(&cancel(id));
    }
    assert_eq!((in_flight.open.len(), in_flight.cancelled.len()), (0, MAX_CANCELLED));
    assert_eq!(in_flight.check_reply(&rows(9_999, 16)), Ok(()));
    assert!(in_flight.check_reply(&rows(0, 16)).is_err());
}

/// A remote function may answer anything: twice, without a message, too much, or bytes that are no reply.
#[test]
fn generated_replies_are_accepted_once_and_in_size() {
    let cases = Cases::new("replies of remote functions", 300);
    for number in 0..cases.count() {
        let mut dice = cases.choices(number);
        let mut in_flight = InFlightMessages::default();
        let mut waiting: HashMap<u64, usize> = HashMap::new();
        for id in 0..200 {
            let id = if dice.once_in(20) { u64::MAX - id } else { id };
            let count = dice.below(4);
            in_flight.record_sent(&work(id, count, count));
            waiting.insert(id, 16 * count);
            if dice.once_in(4) {
                in_flight.record_sent(&cancel(dice.below(200) as u64));
            }
            let mut bytes = rows(dice.below(200) as u64, *dice.one_of(&[0, 16, 48, 49])).encode_to_vec();
            if dice.once_in(4) {
                dice.spoil(&mut bytes);
            }
            let Ok(reply) = ForwardReply::decode(&*bytes) else { continue };
            let most = waiting.get(&reply.id).copied();
            let is_accepted = in_flight.check_reply(&reply).is_ok();
            let size = match &reply.outcome {
                Some(Outcome::Rows(rows)) => rows.rows.len(),
                _ => 0,
            };
            assert!(!is_accepted || most.is_some_and(|most| size <= most), "case {number}: {reply:?}");
            // Accepted or not, the message counts as answered.
            waiting.remove(&reply.id);
        }
        assert!(in_flight.open.len() + in_flight.cancelled.len() <= waiting.len(), "case {number}");
    }
}
