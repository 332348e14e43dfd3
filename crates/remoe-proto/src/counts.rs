//! Counts of elements in a message, bounded before it is decoded: an empty message takes two bytes on the wire and up
//! to 56 in memory, so that a bound of bytes alone lets an answer grow 28-fold.

use crate::limits::{MAX_ENDPOINTS, MAX_EXPERTS, MAX_LAYERS};
use crate::v1::{MainDescription, RoutingAck};
use bytes::Buf;
use prost::Message;
use prost::encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field};
use std::marker::PhantomData;
use tonic::Status;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};

/// Repeated fields of a message.
#[derive(Debug)]
pub struct Counts(&'static [Repeated]);

/// A repeated field.
#[derive(Debug)]
struct Repeated {
    tag: u32,
    name: &'static str,
    /// Elements that it may have.
    most: usize,
    /// Repeated fields of its elements; none: they are numbers.
    of: Option<Counts>,
}

const fn messages(tag: u32, name: &'static str, most: usize, of: &'static [Repeated]) -> Repeated {
    Repeated { tag, name, most, of: Some(Counts(of)) }
}

const fn numbers(tag: u32, name: &'static str, most: usize) -> Repeated {
    Repeated { tag, name, most, of: None }
}

/// A message whose elements are counted before it is decoded.
pub trait Counted: Message + Default + 'static {
    /// Repeated fields.
    const COUNTS: Counts;
}

const EXPERTS: &[Repeated] = &[numbers(2, "local.experts", MAX_EXPERTS)];

const PAIRS: &[Repeated] =
    &[numbers(2, "pairs.experts", MAX_EXPERTS), numbers(3, "pairs.pairs", MAX_EXPERTS)];

const DESCRIPTION: &[Repeated] = &[
    messages(7, "local", MAX_LAYERS, EXPERTS),
    messages(13, "work", MAX_ENDPOINTS, &[]),
    messages(14, "pairs", MAX_LAYERS, PAIRS),
];

const ACKNOWLEDGEMENT: &[Repeated] = &[messages(2, "problems", MAX_ENDPOINTS, &[])];

impl Counted for MainDescription {
    const COUNTS: Counts = Counts(DESCRIPTION);
}

impl Counted for RoutingAck {
    const COUNTS: Counts = Counts(ACKNOWLEDGEMENT);
}

impl Counts {
    /// Counts the elements of `message`, which is not decoded.
    ///
    /// # Errors
    /// A field has too many of them, or the bytes are no message.
    pub fn check(&self, mut message: &[u8]) -> Result<(), String> {
        let mut counted = vec![0_usize; self.0.len()];
        let invalid = |error: prost::DecodeError| format!("invalid message: {error}");
        while !message.is_empty() {
            let (tag, wire) = decode_key(&mut message).map_err(invalid)?;
            let Some(at) = self.0.iter().position(|field| field.tag == tag) else {
                skip_field(wire, tag, &mut message, DecodeContext::default()).map_err(invalid)?;
                continue;
            };
            let field = &self.0[at];
            counted[at] += match wire {
                WireType::LengthDelimited => {
                    let length = decode_varint(&mut message).map_err(invalid)?;
                    let length = usize::try_from(length).ok().filter(|length| *length <= message.len());
                    let (element, rest) = message.split_at(length.ok_or("invalid message: cut off")?);
                    message = rest;
                    match &field.of {
                        // Each number ends with a byte without the highest bit.
                        None => element.iter().filter(|byte| **byte < 0x80).count(),
                        Some(of) => {
                            of.check(element)?;
                            1
                        }
                    }
                }
                _ => {
                    skip_field(wire, tag, &mut message, DecodeContext::default()).map_err(invalid)?;
                    1
                }
            };
            if counted[at] > field.most {
                return Err(format!(
                    "too many elements of `{}`: expected at most {}",
                    field.name, field.most
                ));
            }
        }
        Ok(())
    }
}

/// Codec of calls that are answered by a [`Counted`] message.
#[derive(Debug)]
pub struct CountedCodec<T, U>(PhantomData<(T, U)>);

impl<T, U> Default for CountedCodec<T, U> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<T: Message + 'static, U: Counted> Codec for CountedCodec<T, U> {
    type Encode = T;
    type Decode = U;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self::default()
    }

    fn decoder(&mut self) -> Self {
        Self::default()
    }
}

impl<T: Message + 'static, U: Send + 'static> Encoder for CountedCodec<T, U> {
    type Item = T;
    type Error = Status;

    fn encode(&mut self, item: T, into: &mut EncodeBuf<'_>) -> Result<(), Status> {
        item.encode(into).map_err(|error| Status::internal(error.to_string()))
    }
}

impl<T: Send + 'static, U: Counted> Decoder for CountedCodec<T, U> {
    type Item = U;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<U>, Status> {
        let message = from.copy_to_bytes(from.remaining());
        U::COUNTS.check(&message).map_err(Status::out_of_range)?;
        U::decode(message).map(Some).map_err(|error| Status::internal(error.to_string()))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::v1::{EndpointProblem, EndpointWork, LayerExperts, LayerPairs};

    fn check<T: Counted>(message: &T) -> Result<(), String> {
        T::COUNTS.check(&message.encode_to_vec())
    }

    #[test]
    fn elements_beyond_a_bound_are_refused_by_name() {
        let pairs = LayerPairs { layer: 1, experts: vec![300; MAX_EXPERTS], pairs: vec![1; MAX_EXPERTS] };
        let experts = LayerExperts { layer: u32::MAX, experts: vec![u32::MAX; MAX_EXPERTS] };
        let largest = MainDescription {
            checkpoint: "c".into(),
            age_us: u64::MAX,
            local: vec![experts.clone(); 8],
            work: vec![EndpointWork::default(); MAX_ENDPOINTS],
            pairs: vec![pairs.clone(); 8],
            ..MainDescription::default()
        };
        assert_eq!(check(&largest), Ok(()));
        type Spoil = fn(&mut MainDescription);
        let refused: [(&str, Spoil); 6] = [
            ("local", |said| said.local = vec![LayerExperts::default(); MAX_LAYERS + 1]),
            ("local.experts", |said| said.local[2].experts.push(0)),
            ("work", |said| said.work.push(EndpointWork::default())),
            ("pairs", |said| said.pairs = vec![LayerPairs::default(); MAX_LAYERS + 1]),
            ("pairs.experts", |said| said.pairs[1].experts.push(300)),
            ("pairs.pairs", |said| said.pairs[1].pairs.push(u64::MAX)),
        ];
        for (name, spoil) in refused {
            let mut spoiled = largest.clone();
            spoil(&mut spoiled);
            assert!(check(&spoiled).is_err_and(|error| error.contains(&format!("`{name}`"))), "{name}");
        }
        let ack = RoutingAck {
            problems: vec![EndpointProblem::default(); MAX_ENDPOINTS + 1],
            ..RoutingAck::default()
        };
        assert!(check(&ack).is_err_and(|error| error.contains("`problems`")));
    }

    /// Numbers one by one, in pieces, and bytes that are no message.
    #[test]
    fn elements_are_counted_however_they_are_written() {
        const NUMBERS: &[Repeated] = &[numbers(2, "all.numbers", 3)];
        const ALL: &[Repeated] = &[messages(2, "all", 3, NUMBERS)];
        let counts = Counts(ALL);
        let of = |inner: &[u8]| [&[0x12, inner.len() as u8], inner].concat();
        assert!(counts.check(&of(&[0x10, 1, 0x10, 1, 0x12, 1, 1])).is_ok());
        assert!(counts.check(&of(&[0x10, 1, 0x10, 1, 0x12, 2, 1, 1])).is_err());
        assert!(counts.check(&of(&[]).repeat(3)).is_ok());
        assert!(counts.check(&of(&[]).repeat(4)).is_err());
        for broken in [&[0x12][..], &[0x12, 5], &[0xff; 12], &[0x13], &[0x0a, 0xff, 0xff, 0xff, 0xff, 0x0f]] {
            assert!(
                counts.check(broken).is_err_and(|error| error.starts_with("invalid message")),
                "{broken:?}"
            );
        }
    }
}
