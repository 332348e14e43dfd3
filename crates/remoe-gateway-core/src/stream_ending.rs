//! End of an answer, held back until its cost is in the ledger and the answer is stored.

use crate::body_budget::BodyReservation;
use crate::cost_field::{CostField, Split, cost_field};
use bytes::{Bytes, BytesMut};
use remoe_billing::RequestCost;

/// Largest end that is held, in bytes. A longer one passes without being held.
const MAX_HELD_END_BYTES: usize = 16 << 20;

/// Search for the last event of a stream and for the cost in its usage, in a body that arrives in pieces.
pub(crate) struct StreamEnding {
    /// Lines with which the last event begins.
    last_event_lines: &'static [&'static [u8]],
    /// Search for the cost placeholder; `None` if the request asks for no cost, or once it was replaced.
    field: Option<CostField>,
    /// Field that replaces the placeholder, if the cost is known before the body.
    known_cost_field: Option<Bytes>,
    /// Beginning of the present line, as long as it may become one of `last_event_lines`.
    line: Vec<u8>,
    /// Set if the present line is none of `last_event_lines`.
    is_other_line: bool,
    held: BytesMut,
    /// Set once bytes are held: from here on everything is.
    is_holding: bool,
    /// Set if holding began at the cost placeholder, so that the rest of the usage is held.
    holds_usage: bool,
    /// Memory for held bytes; `None`: bounded by [`MAX_HELD_END_BYTES`] alone.
    reservation: Option<BodyReservation>,
}

impl StreamEnding {
    /// Looks for an event that begins with one of `last_event_lines`, and before it for the cost `placeholder`.
    pub(crate) fn of_stream(last_event_lines: &'static [&'static [u8]], placeholder: Option<&str>) -> Self {
        let field = placeholder.map(CostField::new);
        Self {
            last_event_lines,
            field,
            known_cost_field: None,
            line: Vec::new(),
            is_other_line: false,
            held: BytesMut::new(),
            is_holding: false,
            holds_usage: false,
            reservation: None,
        }
    }

    /// Counts held bytes against `reservation`. If it cannot grow, the bytes pass.
    pub(crate) fn within(self, reservation: BodyReservation) -> Self {
        Self { reservation: Some(reservation), ..self }
    }

    /// Writes `cost` into a body that is no stream. Nothing is held, because the cost is known before the body.
    pub(crate) fn of_body(placeholder: Option<&str>, cost: Option<&RequestCost>) -> Self {
        Self { known_cost_field: Some(cost_field(cost)), ..Self::of_stream(&[], placeholder) }
    }

    /// Takes the next bytes and returns those that may be sent. The beginning of a last-event line may be sent before
    /// the line is complete: clients act on complete events only.
    pub(crate) fn take(&mut self, data: Bytes) -> Bytes {
        if self.is_holding {
            return self.hold(&data);
        }
        let Some(field) = &mut self.field else { return self.take_lines(data) };
        let Split { before, after } = field.take(data);
        if let (Some(cost), Some(after)) = (&self.known_cost_field, &after) {
            self.field = None;
            return [&before[..], cost, after].concat().into();
        }
        let before = self.take_lines(before);
        let Some(field) = &mut self.field else { return before };
        if self.is_holding {
            // Everything from the line of the last event on is held.
            self.held.extend_from_slice(&field.release());
        }
        let Some(after) = after else { return before };
        self.held.extend_from_slice(field.pattern());
        self.holds_usage = !self.is_holding;
        self.is_holding = true;
        [before, self.hold(&after)].concat().into()
    }

    fn take_lines(&mut self, data: Bytes) -> Bytes {
        if self.last_event_lines.is_empty() {
            return data;
        }
        for (index, &byte) in data.iter().enumerate() {
            if !self.is_other_line {
                self.line.push(byte);
                self.is_other_line = !self.last_event_lines.iter().any(|mark| mark.starts_with(&self.line));
            }
            if byte == b'\n' {
                if !self.is_other_line && self.last_event_lines.contains(&self.line.as_slice()) {
                    self.is_holding = true;
                    // The part of the line in an earlier piece has been sent already.
                    let begin = (index + 1).saturating_sub(self.line.len());
                    self.held.extend_from_slice(&data[begin..]);
                    return data.slice(..begin);
                }
                self.line.clear();
                self.is_other_line = false;
            }
        }
        data
    }

    /// Holds `data`. If that is too much, returns all held bytes.
    fn hold(&mut self, data: &[u8]) -> Bytes {
        self.held.extend_from_slice(data);
        let bytes = self.held.len();
        let is_reserved =
            self.reservation.as_mut().is_none_or(|reservation| reservation.resize(bytes).is_ok());
        if bytes > MAX_HELD_END_BYTES || !is_reserved { self.release(None) } else { Bytes::new() }
    }

    /// Returns whether anything is held.
    pub(crate) fn is_held(&self) -> bool {
        !self.held.is_empty() || self.field.as_ref().is_some_and(CostField::is_withheld)
    }

    /// Returns the held bytes, with `cost` in place of the placeholder.
    pub(crate) fn release(&mut self, cost: Option<&RequestCost>) -> Bytes {
        self.holds_usage = false;
        if let Some(reservation) = &mut self.reservation {
            reservation.shrink_to(0);
        }
        let held = self.held.split().freeze();
        match &mut self.field {
            // Nothing is held while the beginning of a field is withheld.
            Some(field) if field.is_withheld() => field.release(),
            Some(field) => field.completed(held, cost),
            None => held,
        }
    }

    /// Returns the held bytes of a stream that breaks off which may be sent: the rest of the usage, without the cost.
    /// The last event is dropped.
    pub(crate) fn abandon(&mut self) -> Bytes {
        if !self.holds_usage {
            return self.field.as_mut().map(CostField::release).unwrap_or_default();
        }
        let held = self.release(None);
        let event = held.windows(2).position(|bytes| bytes == b"\n\n");
        held.slice(..event.map_or(held.len(), |start| start + 2))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::body_budget::{BodyBudget, BudgetHolder};
    use std::sync::Arc;

    fn cost() -> RequestCost {
        RequestCost { total: 5, main: 5, prefill: 5, ..RequestCost::default() }
    }

    const LAST_EVENT_LINES: &[&[u8]] = &[b"data: [DONE]\n", b"event: end\n"];

    #[test]
    fn last_event_is_held_in_any_pieces() {
        for last in ["data: [DONE]\n\n", "event: end\ndata: {\"a\":1}\n\n"] {
            let before = "event: endless\ndata: {\"text\":\"data: [DONE]\\nevent: end\"}\n\n";
            let text = format!("{before}{last}");
            for size in 1..=text.len() {
                let mut end = StreamEnding::of_stream(LAST_EVENT_LINES, None);
                let pieces =
                    text.as_bytes().chunks(size).map(|piece| end.take(Bytes::copy_from_slice(piece)));
                let released: Vec<u8> = pieces.flatten().collect();
                assert!(end.is_held(), "{size}");
                let held = end.release(None);
                assert_eq!([&released[..], &held[..]].concat(), text.as_bytes(), "{size}");
                // The whole mark at most.
                assert!(released.len() < before.len() + last.find('\n').unwrap_or(0) + 1, "{size}");
                assert!(
                    held.ends_with(last.split_once('\n').map_or("", |(_, rest)| rest).as_bytes()),
                    "{size}"
                );
            }
        }
    }

    #[test]
    fn event_that_is_too_long_passes_by() {
        let mut end = StreamEnding::of_stream(LAST_EVENT_LINES, None);
        assert!(end.take(Bytes::from_static(b"event: end\n")).is_empty());
        let long = Bytes::from(vec![b'x'; MAX_HELD_END_BYTES]);
        assert_eq!(end.take(long).len(), MAX_HELD_END_BYTES + "event: end\n".len());
        assert!(!end.is_held());
    }

    /// The usage of a stream and its end in pieces of `size` bytes: the bytes released before the end, and the state that holds the rest.
    fn usage(size: usize) -> (Vec<u8>, StreamEnding) {
        let text = "data: {\"usage\":{\"remoe\":{\"a\":1,\"cost\":\"0f\"}}}\n\ndata: [DONE]\n\n";
        let mut end = StreamEnding::of_stream(LAST_EVENT_LINES, Some("0f"));
        let pieces = text.as_bytes().chunks(size).map(|piece| end.take(Bytes::copy_from_slice(piece)));
        let released: Vec<u8> = pieces.flatten().collect();
        (released, end)
    }

    #[test]
    fn usage_is_held_until_its_cost_is_known() {
        let field = cost_field(Some(&cost()));
        for size in 1..80 {
            for (cost, field) in [(Some(&cost()), &field[..]), (None, b"")] {
                let (released, mut end) = usage(size);
                assert_eq!(released, b"data: {\"usage\":{\"remoe\":{\"a\":1", "{size}");
                assert!(end.is_held());
                let held = end.release(cost);
                assert_eq!(held, [field, b"}}}\n\ndata: [DONE]\n\n"].concat(), "{size}");
                assert!(!end.is_held() && end.release(cost).is_empty(), "once");
            }
        }
    }

    #[test]
    fn last_event_with_usage_gets_its_cost() {
        let begin = "event: end\ndata: {\"a\":1,\"c\":{\"b\":1";
        let text = format!("{begin},\"cost\":\"0f\"}}}}\n\n");
        for size in 1..=text.len() {
            let mut end = StreamEnding::of_stream(LAST_EVENT_LINES, Some("0f"));
            let pieces = text.as_bytes().chunks(size).map(|piece| end.take(Bytes::copy_from_slice(piece)));
            let released: Vec<u8> = pieces.flatten().collect();
            let all = [&released[..], &end.release(Some(&cost()))].concat();
            assert_eq!(all, [begin.as_bytes(), &cost_field(Some(&cost())), b"}}\n\n"].concat(), "{size}");
        }
    }

    #[test]
    fn broken_stream_ends_its_usage_without_cost() {
        for size in 1..80 {
            assert_eq!(usage(size).1.abandon(), "}}}\n\n", "{size}");
        }
        let mut end = StreamEnding::of_stream(LAST_EVENT_LINES, Some("0f"));
        assert_eq!(end.take(Bytes::from_static(b"{\"a\":1,\"cost\":\"0")), "{\"a\":1");
        assert_eq!(end.abandon(), ",\"cost\":\"0");
        let mut end = StreamEnding::of_stream(LAST_EVENT_LINES, Some("0f"));
        assert_eq!(end.take(Bytes::from_static(b"data: [DONE]\n\n")), "");
        assert!(end.abandon().is_empty());
    }

    #[test]
    fn cost_is_inserted_into_a_relayed_body() {
        let text = "{\"a\":\"data: [DONE]\n\",\"cost\":\"0f\"},\"cost";
        for size in 1..60 {
            let mut end = StreamEnding::of_body(Some("0f"), Some(&cost()));
            let pieces = text.as_bytes().chunks(size).map(|piece| end.take(Bytes::copy_from_slice(piece)));
            let released: Vec<u8> = pieces.flatten().collect();
            assert!(!end.is_held(), "{size}");
            let field = cost_field(Some(&cost()));
            assert_eq!(released, [b"{\"a\":\"data: [DONE]\n\"", &field[..], b"},\"cost"].concat(), "{size}");
        }
    }

    #[test]
    fn end_without_room_passes_by() {
        let body_budget = Arc::new(BodyBudget::new(100, 0));
        let holder = || BudgetHolder::answer(&"t".into(), &"m".into());
        let mut end = StreamEnding::of_stream(LAST_EVENT_LINES, None).within(body_budget.empty(holder()));
        assert!(end.take(Bytes::from_static(b"event: end\n")).is_empty() && end.is_held());
        assert!(end.take(Bytes::from(vec![b'x'; 30])).is_empty());
        let passed = end.take(Bytes::from(vec![b'y'; 30]));
        assert_eq!(passed.len(), 71);
        assert!(!end.is_held() && body_budget.take(holder(), 50).is_ok(), "all of it came back");
    }
}
