//! Keys and values of one sequence.

use tch::{Device, Kind, TchError, Tensor};

/// A cache grows by doubling from at least so many positions.
const FIRST_CAPACITY: i64 = 64;

/// The keys and values of one sequence in every layer. A layer's two tensors are
/// [kv heads, capacity, head dim] in the compute dtype, on the engine's device.
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
    /// An empty cache.
    pub(crate) fn new(shapes: &[CacheShape], kind: Kind, device: Device) -> Result<Self, TchError> {
        let layers = shapes
            .iter()
            .map(|shape| {
                let empty = |dim| Tensor::f_empty([shape.kv_heads, FIRST_CAPACITY, dim], (kind, device));
                Ok(LayerCache { keys: empty(shape.key_dim)?, values: empty(shape.value_dim)? })
            })
            .collect::<Result<_, TchError>>()?;
        Ok(Self { layers, length: 0 })
    }

    /// Positions that have been forwarded.
    pub(crate) fn length(&self) -> i64 {
        self.length
    }

    /// Elements that `layer` keeps of one position.
    #[cfg(test)]
    pub(crate) fn elements_per_position(&self, layer: usize) -> usize {
        let per_position = |tensor: &Tensor| tensor.numel() / tensor.size()[1] as usize;
        per_position(&self.layers[layer].keys) + per_position(&self.layers[layer].values)
    }

    /// The same sequence a second time, for another continuation.
    pub(crate) fn fork(&self) -> Result<Self, TchError> {
        let layers = self
            .layers
            .iter()
            .map(|layer| Ok(LayerCache { keys: duplicate(&layer.keys)?, values: duplicate(&layer.values)? }))
            .collect::<Result<_, TchError>>()?;
        Ok(Self { layers, length: self.length })
    }

    /// Writes the keys and values of the next rows ([kv heads, rows, dim]) of `layer` and returns
    /// all from position `from` on, those rows included.
    pub(crate) fn extend(
        &mut self,
        layer: usize,
        keys: &Tensor,
        values: &Tensor,
        from: i64,
    ) -> Result<(Tensor, Tensor), TchError> {
        let rows = keys.size()[1];
        let end = self.length + rows;
        let cache = &mut self.layers[layer];
        reserve(&mut cache.keys, self.length, end)?;
        reserve(&mut cache.values, self.length, end)?;
        cache.keys.f_narrow(1, self.length, rows)?.f_copy_(keys)?;
        cache.values.f_narrow(1, self.length, rows)?.f_copy_(values)?;
        Ok((cache.keys.f_narrow(1, from, end - from)?, cache.values.f_narrow(1, from, end - from)?))
    }

    /// Counts `rows` as forwarded, once every layer has been extended by them.
    pub(crate) fn advance(&mut self, rows: i64) {
        self.length += rows;
    }
}

/// Makes room for `needed` positions, keeping the first `used`.
fn reserve(tensor: &mut Tensor, used: i64, needed: i64) -> Result<(), TchError> {
    let mut size = tensor.size();
    if needed <= size[1] {
        return Ok(());
    }
    size[1] = needed.max(2 * size[1]);
    let grown = Tensor::f_empty(&size[..], (tensor.f_kind()?, tensor.device()))?;
    grown.f_narrow(1, 0, used)?.f_copy_(&tensor.f_narrow(1, 0, used)?)?;
    *tensor = grown;
    Ok(())
}

fn duplicate(tensor: &Tensor) -> Result<Tensor, TchError> {
    let mut copy = tensor.f_empty_like()?;
    copy.f_copy_(tensor)?;
    Ok(copy)
}
