//! The element types of tensors: their names, sizes, and how safetensors spells them.
//!
//! Names are torch's. A type that readers of safetensors in wide use do not know is stored there as bytes (`U8`),
//! and only the manifest tells what they are.

use forebay_core::{Error, ErrorKind, Result};

/// An element type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dtype {
    /// torch's name without `torch.`.
    pub name: &'static str,
    /// Bytes of one element.
    pub size: u64,
    /// safetensors' name; `None` where the bytes are stored as `U8`.
    pub safetensors: Option<&'static str>,
}

const fn known(name: &'static str, size: u64, safetensors: &'static str) -> Dtype {
    Dtype { name, size, safetensors: Some(safetensors) }
}

const fn opaque(name: &'static str, size: u64) -> Dtype {
    Dtype { name, size, safetensors: None }
}

/// Every element type that a checkpoint can hold.
pub const DTYPES: &[Dtype] = &[
    known("bool", 1, "BOOL"),
    known("uint8", 1, "U8"),
    known("int8", 1, "I8"),
    known("uint16", 2, "U16"),
    known("int16", 2, "I16"),
    known("uint32", 4, "U32"),
    known("int32", 4, "I32"),
    known("uint64", 8, "U64"),
    known("int64", 8, "I64"),
    known("float16", 2, "F16"),
    known("bfloat16", 2, "BF16"),
    known("float32", 4, "F32"),
    known("float64", 8, "F64"),
    known("float8_e4m3fn", 1, "F8_E4M3"),
    known("float8_e5m2", 1, "F8_E5M2"),
    opaque("float8_e4m3fnuz", 1),
    opaque("float8_e5m2fnuz", 1),
    opaque("float8_e8m0fnu", 1),
    opaque("float4_e2m1fn_x2", 1),
    opaque("bcomplex32", 4),
    opaque("complex32", 4),
    opaque("complex64", 8),
    opaque("complex128", 16),
    opaque("int1", 1),
    opaque("int2", 1),
    opaque("int3", 1),
    opaque("int4", 1),
    opaque("int5", 1),
    opaque("int6", 1),
    opaque("int7", 1),
    opaque("uint1", 1),
    opaque("uint2", 1),
    opaque("uint3", 1),
    opaque("uint4", 1),
    opaque("uint5", 1),
    opaque("uint6", 1),
    opaque("uint7", 1),
    opaque("bits8", 1),
    opaque("bits16", 2),
    opaque("bits1x8", 1),
    opaque("bits2x4", 1),
    opaque("bits4x2", 1),
];

impl Dtype {
    /// The type of that name.
    ///
    /// # Errors
    /// `Unsupported` when there is none.
    pub fn named(name: &str) -> Result<Self> {
        let unknown =
            || Error::new(ErrorKind::Unsupported, format!("element type `{name}` is not supported"));
        DTYPES.iter().find(|dtype| dtype.name == name).copied().ok_or_else(unknown)
    }

    /// Bytes of a dense array of `shape`; `None` when they do not fit 64 bits.
    pub fn bytes_of(&self, shape: &[u64]) -> Option<u64> {
        elements(shape)?.checked_mul(self.size)
    }
}

/// Elements of a dense array of `shape` (1 for a scalar); `None` when they do not fit 64 bits.
pub fn elements(shape: &[u64]) -> Option<u64> {
    if shape.contains(&0) {
        return Some(0);
    }
    shape.iter().try_fold(1u64, |count, dimension| count.checked_mul(*dimension))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_checked() {
        let float = Dtype::named("float32").expect("float32");
        assert_eq!(float.bytes_of(&[]), Some(4));
        assert_eq!(float.bytes_of(&[3, 0, u64::MAX]), Some(0));
        assert_eq!(float.bytes_of(&[u64::MAX, 2]), None);
        assert_eq!(float.bytes_of(&[u64::MAX]), None);
        assert!(Dtype::named("object").is_err());
    }
}
