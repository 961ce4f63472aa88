# SPDX-License-Identifier: Apache-2.0
"""Hand-overs from one engine to another: between real engines, and their reads alone (`raw`)."""
