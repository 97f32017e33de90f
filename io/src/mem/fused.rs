//! Copying and checksumming in one pass: the bytes go through the processor once, and past its caches.
//!
//! Where the processor has VPCLMULQDQ and AVX-512, four pages are copied side by side, 64 bytes of each at a time,
//! with streaming stores, and CRC-32C is folded from the registers on the way (Gopal et al., "Fast CRC computation
//! for generic polynomials using PCLMULQDQ", Intel 2009). Elsewhere a block is copied and then checksummed while it
//! is in the cache. The result is the same; the target's bytes are out of the caches after the first way only.
#![allow(unsafe_code)]

use forebay_core::checksum::Crc32c;

/// Bytes copied before they are checksummed, on the way without the processor's help: fits the second-level cache.
const BLOCK: usize = 128 << 10;

/// Below this many bytes, one page of each stream, streaming stores do not pay.
#[cfg(all(target_arch = "x86_64", not(debug_assertions)))]
const LEAST: usize = 16 << 10;

/// Copies `source` to `target` and gives the CRC-32C of what `target` then holds, even where another thread writes
/// to the source meanwhile.
///
/// # Panics
/// When the two have different lengths.
pub fn copy_with_crc32c(source: &[u8], target: &mut [u8]) -> u32 {
    assert_eq!(source.len(), target.len(), "a copy is as long as its source");
    // Without optimisation intrinsics are calls, and the plain way is several times as fast.
    #[cfg(all(target_arch = "x86_64", not(debug_assertions)))]
    if source.len() >= LEAST && x86::is_supported() {
        // SAFETY: the processor was asked, and the lengths are equal.
        return unsafe { x86::copy(source, target) };
    }
    copy_in_blocks(source, target)
}

fn copy_in_blocks(source: &[u8], target: &mut [u8]) -> u32 {
    let mut crc = Crc32c::default();
    for (source, target) in source.chunks(BLOCK).zip(target.chunks_mut(BLOCK)) {
        target.copy_from_slice(source);
        crc.update(target);
    }
    crc.value()
}

#[cfg(target_arch = "x86_64")]
#[cfg_attr(debug_assertions, allow(dead_code, reason = "used by the tests only"))]
mod x86 {
    use std::arch::x86_64::*;

    /// Bytes of one register.
    const STEP: usize = 64;
    /// Bytes of each of the four streams: a page, so that each has its own run of the hardware's prefetcher.
    const PAGE: usize = 4096;
    /// CRC-32C's polynomial, bits reflected.
    const POLYNOMIAL: u32 = 0x82f6_3b78;

    /// x^n modulo the polynomial, bits reflected.
    const fn power(n: usize) -> i64 {
        let mut value = 0x8000_0000u32;
        let mut i = 0;
        while i < n {
            value = (value >> 1) ^ (if value & 1 == 1 { POLYNOMIAL } else { 0 });
            i += 1;
        }
        value as i64
    }

    /// What the low and the high half of a 128-bit lane are multiplied by to move it forward by `bits`. In the
    /// reflected form a product carries one factor x, and a constant in the low 32 bits of its word carries x^32.
    const fn factors(bits: usize) -> [i64; 2] {
        [power(bits + 31), power(bits - 33)]
    }

    const BY_LANE: [[i64; 2]; 3] = [factors(384), factors(256), factors(128)];
    const BY_STEP: [i64; 2] = factors(8 * STEP);
    const BY_PAGE: [i64; 2] = factors(8 * PAGE);

    pub(super) fn is_supported() -> bool {
        is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("vpclmulqdq")
            && is_x86_feature_detected!("pclmulqdq")
            && is_x86_feature_detected!("sse4.2")
    }

    /// Copies and gives the checksum.
    ///
    /// # Safety
    /// The processor has the features, and `target` is as long as `source`.
    #[target_feature(enable = "avx512f,vpclmulqdq,pclmulqdq,sse4.2")]
    pub(super) unsafe fn copy(source: &[u8], target: &mut [u8]) -> u32 {
        // SAFETY: every access below lies in one of the two slices: `at` only grows by what was just handled, and
        // each loop first checks that its bytes are left. Streaming stores go to multiples of 64 only.
        unsafe {
            let (from, to, length) = (source.as_ptr(), target.as_mut_ptr(), source.len());
            let head = to.align_offset(STEP).min(length);
            target[..head].copy_from_slice(&source[..head]);
            let state = crc_bytes(!0, &target[..head]);
            let mut at = head;
            if length - at < STEP {
                target[at..].copy_from_slice(&source[at..]);
                return !crc_bytes(state, &target[at..]);
            }
            let by_step = broadcast(BY_STEP);
            let by_page = broadcast(BY_PAGE);
            // The checksum so far enters with the first four bytes that follow.
            let entering = _mm512_zextsi128_si512(_mm_cvtsi32_si128(state as i32));
            let data = load(from.add(at));
            let mut sum = _mm512_xor_si512(data, entering);
            stream(to.add(at), data);
            at += STEP;
            while length - at >= 4 * PAGE {
                let mut sums = [sum, _mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512()];
                for offset in (0..PAGE).step_by(STEP) {
                    for (page, sum) in sums.iter_mut().enumerate() {
                        let place = at + page * PAGE + offset;
                        let data = load(from.add(place));
                        *sum = fold(*sum, by_step, data);
                        stream(to.add(place), data);
                    }
                }
                sum = fold(fold(fold(sums[0], by_page, sums[1]), by_page, sums[2]), by_page, sums[3]);
                at += 4 * PAGE;
            }
            while length - at >= STEP {
                let data = load(from.add(at));
                sum = fold(sum, by_step, data);
                stream(to.add(at), data);
                at += STEP;
            }
            target[at..].copy_from_slice(&source[at..]);
            _mm_sfence();
            !crc_bytes(reduce(sum), &target[at..])
        }
    }

    #[target_feature(enable = "avx512f")]
    fn broadcast(factors: [i64; 2]) -> __m512i {
        _mm512_broadcast_i32x4(_mm_set_epi64x(factors[1], factors[0]))
    }

    /// # Safety
    /// 64 bytes from `from` can be read.
    #[target_feature(enable = "avx512f")]
    unsafe fn load(from: *const u8) -> __m512i {
        // SAFETY: the caller's.
        unsafe { _mm512_loadu_si512(from.cast()) }
    }

    /// # Safety
    /// 64 bytes from `to`, a multiple of 64, can be written.
    #[target_feature(enable = "avx512f")]
    unsafe fn stream(to: *mut u8, data: __m512i) {
        // SAFETY: the caller's.
        unsafe { _mm512_stream_si512(to.cast(), data) }
    }

    /// Moves `sum` forward by the factors' distance and adds `data`.
    #[target_feature(enable = "avx512f,vpclmulqdq")]
    fn fold(sum: __m512i, factors: __m512i, data: __m512i) -> __m512i {
        let low = _mm512_clmulepi64_epi128::<0x00>(sum, factors);
        let high = _mm512_clmulepi64_epi128::<0x11>(sum, factors);
        _mm512_ternarylogic_epi64::<0x96>(low, high, data)
    }

    /// The checksum's state after the 64 bytes that `sum` stands for.
    #[target_feature(enable = "avx512f,pclmulqdq,sse4.2")]
    fn reduce(sum: __m512i) -> u32 {
        let lanes = [
            _mm512_extracti32x4_epi32::<0>(sum),
            _mm512_extracti32x4_epi32::<1>(sum),
            _mm512_extracti32x4_epi32::<2>(sum),
            _mm512_extracti32x4_epi32::<3>(sum),
        ];
        let mut last = lanes[3];
        for (lane, factors) in lanes.iter().zip(BY_LANE) {
            let factors = _mm_set_epi64x(factors[1], factors[0]);
            last = _mm_xor_si128(last, _mm_clmulepi64_si128::<0x00>(*lane, factors));
            last = _mm_xor_si128(last, _mm_clmulepi64_si128::<0x11>(*lane, factors));
        }
        let state = _mm_crc32_u64(0, _mm_cvtsi128_si64(last) as u64);
        _mm_crc32_u64(state, _mm_cvtsi128_si64(_mm_unpackhi_epi64(last, last)) as u64) as u32
    }

    /// The state after a few more bytes.
    #[target_feature(enable = "sse4.2")]
    fn crc_bytes(state: u32, bytes: &[u8]) -> u32 {
        bytes.iter().fold(state, |state, byte| _mm_crc32_u8(state, *byte))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every way of copying gives the bytes and the checksum that the plain ones give, at any alignment and length.
    #[test]
    fn every_way_agrees() {
        let source: Vec<u8> = (0..70_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        for start in [0, 1, 63] {
            for length in [0, 1, 63, 64, 65, 127, 128, 4096, 16_383, 16_384 + 64, 16_384 + 65, 33_000, 69_000]
            {
                let source = &source[start..start + length];
                let expected = forebay_core::crc32c(source);
                let mut target = vec![0; length + 64];
                for offset in [0, 1, 32] {
                    let place = &mut target[offset..offset + length];
                    assert_eq!(copy_in_blocks(source, place), expected, "{start} {length} {offset}");
                    assert_eq!(place, source);
                    #[cfg(target_arch = "x86_64")]
                    if x86::is_supported() {
                        place.fill(0);
                        // SAFETY: the processor was asked, and the lengths are equal.
                        assert_eq!(
                            unsafe { x86::copy(source, place) },
                            expected,
                            "{start} {length} {offset}"
                        );
                        assert_eq!(place, source);
                    }
                }
            }
        }
        let mut target = vec![0; source.len()];
        assert_eq!(copy_with_crc32c(&source, &mut target), forebay_core::crc32c(&source));
    }
}
