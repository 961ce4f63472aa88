# SPDX-License-Identifier: Apache-2.0
"""This project's stores inside other caches. Each module needs the package it is named after."""
