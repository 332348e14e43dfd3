//! Keys and values of one sequence.

use tch::{Device, Kind, TchError, Tensor};

/// The keys and values of one sequence in every layer. A layer's two tensors are
/// [kv heads, capacity, head dim] in the compute dtype, on the engine's device. Its owner makes room
/// before it is extended, so that all caches together stay within their limit.
pub(crate) struct SequenceCache {
    layers: Vec<LayerCache>,
    length: i64,
}

struct LayerCache {
    keys: Tensor,
    values: Tensor,
}

/// Shape of one layer's entries.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CacheShape {
    pub(crate) kv_heads: i64,
    pub(crate) key_dim: i64,
    pub(crate) value_dim: i64,
}

impl SequenceCache {
    /// An empty cache without room.
    pub(crate) fn new(shapes: &[CacheShape], kind: Kind, device: Device) -> Result<Self, TchError> {
        let layers = shapes
            .iter()
            .map(|shape| {
                let empty = |dim| Tensor::f_empty([shape.kv_heads, 0, dim], (kind, device));
                Ok(LayerCache { keys: empty(shape.key_dim)?, values: empty(shape.value_dim)? })
            })
            .collect::<Result<_, TchError>>()?;
        Ok(Self { layers, length: 0 })
    }

    /// Positions that have been forwarded.
    pub(crate) fn length(&self) -> i64 {
        self.length
    }

    /// Positions that there is room for.
    pub(crate) fn capacity(&self) -> usize {
        self.layers.first().map_or(0, |layer| layer.keys.size()[1] as usize)
    }

    /// Bytes that the cache takes, room that is not used yet included.
    pub(crate) fn bytes(&self) -> usize {
        let bytes = |tensor: &Tensor| tensor.numel() * tensor.kind().elt_size_in_bytes();
        self.layers.iter().map(|layer| bytes(&layer.keys) + bytes(&layer.values)).sum()
    }

    /// Elements that `layer` keeps of one position.
    #[cfg(test)]
    pub(crate) fn elements_per_position(&self, layer: usize) -> usize {
        let per_position = |tensor: &Tensor| (tensor.size()[0] * tensor.size()[2]) as usize;
        per_position(&self.layers[layer].keys) + per_position(&self.layers[layer].values)
    }

    /// Makes room for `positions` in all, if there is less. While it grows, one tensor of one layer
    /// exists twice.
    pub(crate) fn reserve(&mut self, positions: usize) -> Result<(), TchError> {
        let positions = i64::try_from(positions).unwrap_or(i64::MAX);
        for layer in &mut self.layers {
            for tensor in [&mut layer.keys, &mut layer.values] {
                if tensor.size()[1] < positions {
                    *tensor = resized(tensor, self.length, positions)?;
                }
            }
        }
        Ok(())
    }

    /// Forgets everything and takes no memory any more.
    pub(crate) fn release(&mut self) -> Result<(), TchError> {
        for layer in &mut self.layers {
            for tensor in [&mut layer.keys, &mut layer.values] {
                *tensor = resized(tensor, 0, 0)?;
            }
        }
        self.length = 0;
        Ok(())
    }

    /// The same sequence a second time, for another continuation; without room beyond its length.
    pub(crate) fn fork(&self) -> Result<Self, TchError> {
        let copy = |tensor| resized(tensor, self.length, self.length);
        let layers = self
            .layers
            .iter()
            .map(|layer| Ok(LayerCache { keys: copy(&layer.keys)?, values: copy(&layer.values)? }))
            .collect::<Result<_, TchError>>()?;
        Ok(Self { layers, length: self.length })
    }

    /// Writes the keys and values of the next rows ([kv heads, rows, dim]) of `layer` and returns
    /// all from position `from` on, those rows included.
    ///
    /// # Errors
    /// There is no room for the rows, among others.
    pub(crate) fn extend(
        &mut self,
        layer: usize,
        keys: &Tensor,
        values: &Tensor,
        from: i64,
    ) -> Result<(Tensor, Tensor), TchError> {
        let rows = keys.size()[1];
        let end = self.length + rows;
        let cache = &self.layers[layer];
        cache.keys.f_narrow(1, self.length, rows)?.f_copy_(keys)?;
        cache.values.f_narrow(1, self.length, rows)?.f_copy_(values)?;
        Ok((cache.keys.f_narrow(1, from, end - from)?, cache.values.f_narrow(1, from, end - from)?))
    }

    /// Counts `rows` as forwarded, once every layer has been extended by them.
    pub(crate) fn advance(&mut self, rows: i64) {
        self.length += rows;
    }
}

/// The first `used` positions of `tensor` with room for `positions`.
fn resized(tensor: &Tensor, used: i64, positions: i64) -> Result<Tensor, TchError> {
    let mut size = tensor.size();
    size[1] = positions;
    let copy = Tensor::f_empty(&size[..], (tensor.f_kind()?, tensor.device()))?;
    copy.f_narrow(1, 0, used)?.f_copy_(&tensor.f_narrow(1, 0, used)?)?;
    Ok(copy)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const SHAPES: [CacheShape; 2] = [
        CacheShape { kv_heads: 2, key_dim: 3, value_dim: 5 },
        CacheShape { kv_heads: 1, key_dim: 4, value_dim: 0 },
    ];

    fn rows(shape: CacheShape, first: i64, count: i64) -> (Tensor, Tensor) {
        let values = |dim: i64| {
            let row = Tensor::arange_start(first, first + count, (Kind::Float, Device::Cpu));
            row.view([1, count, 1]).expand([shape.kv_heads, count, dim], false)
        };
        (values(shape.key_dim), values(shape.value_dim))
    }

    fn extended(cache: &mut SequenceCache, count: i64) -> Vec<(Tensor, Tensor)> {
        let first = cache.length();
        let out = (0..).zip(SHAPES).map(|(layer, shape)| {
            let (keys, values) = rows(shape, first, count);
            cache.extend(layer, &keys, &values, 0).unwrap()
        });
        let out = out.collect();
        cache.advance(count);
        out
    }

    #[test]
    fn room_is_what_was_reserved_and_contents_survive_growth() {
        let mut cache = SequenceCache::new(&SHAPES, Kind::Float, Device::Cpu).unwrap();
        assert_eq!((cache.capacity(), cache.bytes()), (0, 0));
        for (reserved, count) in [(3, 3), (7, 2), (7, 2), (8, 1)] {
            cache.reserve(reserved).unwrap();
            assert_eq!(cache.capacity(), reserved);
            assert_eq!(cache.bytes(), reserved * (2 * 3 + 2 * 5 + 4) * 4);
            let seen = extended(&mut cache, count);
            for ((keys, values), shape) in seen.iter().zip(SHAPES) {
                let written = rows(shape, 0, cache.length());
                assert_eq!((keys, values), (&written.0, &written.1));
            }
        }
        let (keys, values) = rows(SHAPES[0], 8, 1);
        assert!(cache.extend(0, &keys, &values, 0).is_err(), "room that nobody reserved");
    }

    #[test]
    fn a_fork_takes_what_is_used_and_goes_its_own_way() {
        let mut cache = SequenceCache::new(&SHAPES, Kind::Float, Device::Cpu).unwrap();
        cache.reserve(100).unwrap();
        extended(&mut cache, 4);
        let mut fork = cache.fork().unwrap();
        assert_eq!((fork.capacity(), fork.length()), (4, 4));
        fork.reserve(5).unwrap();
        let own = extended(&mut fork, 1);
        assert_eq!(own[0].0.size(), [2, 5, 3]);
        let other = extended(&mut cache, 2);
        assert_eq!(own[0].0.narrow(1, 0, 4), other[0].0.narrow(1, 0, 4));
    }
}
