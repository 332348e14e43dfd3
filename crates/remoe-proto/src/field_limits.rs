//! Limits on repeated fields of a message, checked before it is decoded. An empty message takes two bytes on the wire
//! and up to 56 in memory, so that a limit of bytes alone lets an answer grow 28-fold.

use crate::limits::{MAX_ENDPOINTS, MAX_EXPERTS, MAX_LAYERS};
use crate::v1::{MainDescription, RoutingAck};
use bytes::Buf;
use prost::Message;
use prost::encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field};
use std::marker::PhantomData;
use tonic::Status;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};

/// Limits on the repeated fields of a message.
#[derive(Debug)]
pub struct FieldLimits(&'static [FieldLimit]);

/// Limit on one repeated field.
#[derive(Debug)]
struct FieldLimit {
    tag: u32,
    name: &'static str,
    /// Largest number of elements.
    max_elements: usize,
    /// Limits within each element. `None` if the elements are numbers.
    nested: Option<FieldLimits>,
}

const fn messages(
    tag: u32,
    name: &'static str,
    max_elements: usize,
    nested: &'static [FieldLimit],
) -> FieldLimit {
    FieldLimit { tag, name, max_elements, nested: Some(FieldLimits(nested)) }
}

const fn numbers(tag: u32, name: &'static str, max_elements: usize) -> FieldLimit {
    FieldLimit { tag, name, max_elements, nested: None }
}

/// Message whose elements are counted before it is decoded.
pub trait LimitedMessage: Message + Default + 'static {
    /// Limits on its repeated fields.
    const FIELD_LIMITS: FieldLimits;
}

const EXPERTS: &[FieldLimit] = &[numbers(2, "local.experts", MAX_EXPERTS)];

const PAIRS: &[FieldLimit] =
    &[numbers(2, "pairs.experts", MAX_EXPERTS), numbers(3, "pairs.pairs", MAX_EXPERTS)];

const DESCRIPTION: &[FieldLimit] = &[
    messages(7, "local", MAX_LAYERS, EXPERTS),
    messages(13, "work", MAX_ENDPOINTS, &[]),
    messages(14, "pairs", MAX_LAYERS, PAIRS),
];

const ACKNOWLEDGEMENT: &[FieldLimit] = &[messages(2, "problems", MAX_ENDPOINTS, &[])];

impl LimitedMessage for MainDescription {
    const FIELD_LIMITS: FieldLimits = FieldLimits(DESCRIPTION);
}

impl LimitedMessage for RoutingAck {
    const FIELD_LIMITS: FieldLimits = FieldLimits(ACKNOWLEDGEMENT);
}

impl FieldLimits {
    /// Checks the number of elements in the encoded `message`.
    ///
    /// # Errors
    /// A field has too many elements, or the message is malformed.
    pub fn check(&self, mut message: &[u8]) -> Result<(), String> {
        let mut counts = vec![0_usize; self.0.len()];
        let invalid = |error: prost::DecodeError| format!("invalid message: {error}");
        while !message.is_empty() {
            let (tag, wire) = decode_key(&mut message).map_err(invalid)?;
            let Some(index) = self.0.iter().position(|field| field.tag == tag) else {
                skip_field(wire, tag, &mut message, DecodeContext::default()).map_err(invalid)?;
                continue;
            };
            let field = &self.0[index];
            counts[index] += match wire {
                WireType::LengthDelimited => {
                    let length = decode_varint(&mut message).map_err(invalid)?;
                    let length = usize::try_from(length).ok().filter(|length| *length <= message.len());
                    let (element, rest) = message.split_at(length.ok_or("invalid message: cut off")?);
                    message = rest;
                    match &field.nested {
                        // The last byte of each varint has its highest bit clear.
                        None => element.iter().filter(|byte| **byte < 0x80).count(),
                        Some(nested) => {
                            nested.check(element)?;
                            1
                        }
                    }
                }
                _ => {
                    skip_field(wire, tag, &mut message, DecodeContext::default()).map_err(invalid)?;
                    1
                }
            };
            if counts[index] > field.max_elements {
                return Err(format!(
                    "too many elements of `{}`: expected at most {}",
                    field.name, field.max_elements
                ));
            }
        }
        Ok(())
    }
}

/// Codec of calls with a [`LimitedMessage`] answer.
#[derive(Debug)]
pub struct LimitedCodec<T, U>(PhantomData<(T, U)>);

impl<T, U> Default for LimitedCodec<T, U> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<T: Message + 'static, U: LimitedMessage> Codec for LimitedCodec<T, U> {
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

impl<T: Message + 'static, U: Send + 'static> Encoder for LimitedCodec<T, U> {
    type Item = T;
    type Error = Status;

    fn encode(&mut self, item: T, into: &mut EncodeBuf<'_>) -> Result<(), Status> {
        item.encode(into).map_err(|error| Status::internal(error.to_string()))
    }
}

impl<T: Send + 'static, U: LimitedMessage> Decoder for LimitedCodec<T, U> {
    type Item = U;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<U>, Status> {
        let message = from.copy_to_bytes(from.remaining());
        U::FIELD_LIMITS.check(&message).map_err(Status::out_of_range)?;
        U::decode(message).map(Some).map_err(|error| Status::internal(error.to_string()))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::v1::{EndpointProblem, EndpointWork, LayerExperts, LayerPairs};

    fn check<T: LimitedMessage>(message: &T) -> Result<(), String> {
        T::FIELD_LIMITS.check(&message.encode_to_vec())
    }

    #[test]
    fn elements_beyond_a_limit_are_refused_by_name() {
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
        type Change = fn(&mut MainDescription);
        let refused: [(&str, Change); 6] = [
            ("local", |message| message.local = vec![LayerExperts::default(); MAX_LAYERS + 1]),
            ("local.experts", |message| message.local[2].experts.push(0)),
            ("work", |message| message.work.push(EndpointWork::default())),
            ("pairs", |message| message.pairs = vec![LayerPairs::default(); MAX_LAYERS + 1]),
            ("pairs.experts", |message| message.pairs[1].experts.push(300)),
            ("pairs.pairs", |message| message.pairs[1].pairs.push(u64::MAX)),
        ];
        for (name, change) in refused {
            let mut changed = largest.clone();
            change(&mut changed);
            assert!(check(&changed).is_err_and(|error| error.contains(&format!("`{name}`"))), "{name}");
        }
        let ack = RoutingAck {
            problems: vec![EndpointProblem::default(); MAX_ENDPOINTS + 1],
            ..RoutingAck::default()
        };
        assert!(check(&ack).is_err_and(|error| error.contains("`problems`")));
    }

    /// Covers packed and single numbers, and malformed messages.
    #[test]
    fn elements_are_counted_in_every_encoding() {
        const NUMBERS: &[FieldLimit] = &[numbers(2, "all.numbers", 3)];
        const ALL: &[FieldLimit] = &[messages(2, "all", 3, NUMBERS)];
        let limits = FieldLimits(ALL);
        let element = |inner: &[u8]| [&[0x12, inner.len() as u8], inner].concat();
        assert!(limits.check(&element(&[0x10, 1, 0x10, 1, 0x12, 1, 1])).is_ok());
        assert!(limits.check(&element(&[0x10, 1, 0x10, 1, 0x12, 2, 1, 1])).is_err());
        assert!(limits.check(&element(&[]).repeat(3)).is_ok());
        assert!(limits.check(&element(&[]).repeat(4)).is_err());
        for broken in [&[0x12][..], &[0x12, 5], &[0xff; 12], &[0x13], &[0x0a, 0xff, 0xff, 0xff, 0xff, 0x0f]] {
            assert!(
                limits.check(broken).is_err_and(|error| error.starts_with("invalid message")),
                "{broken:?}"
            );
        }
    }
}
